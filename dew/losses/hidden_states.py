"""Matching what happens inside: hidden states, their relations, attention maps.

States are [batch, seq, embed] in pairs of layers, student first. Layers are counted as
the model protocol counts them: `i` is the output of block `i` before any final norm and
the number of blocks itself is the state after it, so a pair says what it compares.
Projectors are arrays of the run, not of the model: an export never holds one. `teacher`
is the number, counted from 0, of the teacher that a term is matched with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from dew.losses.divergences import ForwardKL
from dew.losses.logspace import log_softmax, widened
from dew.losses.term import Schedule

LayerPairs = tuple[tuple[int, int], ...]
States = Sequence[Float[Array, "batch seq _"]]
Projectors = Sequence[Float[Array, "_ _"] | None]


def even_layers(student: int, teacher: int) -> LayerPairs:
    """Pairs the student's block i of Ls with the teacher's block round(i * Lt / Ls).

    Counted from one in that formula and from zero in the result, so the last blocks
    always pair; all are states before the final norm.
    """
    if not 0 < student <= teacher:
        raise ValueError(
            f"even layers need 1 <= student <= teacher blocks, got {student}, {teacher}"
        )
    # Half up: Python's round would take 2.5 to 2 and 3.5 to 4.
    return tuple(
        (i - 1, (2 * i * teacher + student) // (2 * student) - 1)
        for i in range(1, student + 1)
    )


def projector(
    key: Key[Array, ""], student: int, teacher: int
) -> Float[Array, "student teacher"]:
    """A linear map between widths, drawn to keep the size of what it maps."""
    return jax.random.normal(key, (student, teacher)) / jnp.sqrt(student)


@dataclass(frozen=True, kw_only=True)
class HiddenMSE:
    """Squared distance of states, averaged over feature dimensions and layer pairs.

    So it does not grow with the width. A projected student state is compared with the
    teacher's as it is.
    """

    pairs: LayerPairs
    weight: Schedule = 1.0
    teacher: int = 0

    def values(
        self, student: States, teacher: States, projectors: Projectors = ()
    ) -> Float[Array, "batch seq"]:
        """The mean squared distance at every position."""
        ours, theirs = _projected(self.pairs, student, teacher, projectors)
        squares = [
            jnp.mean(jnp.square(x - y), axis=-1)
            for x, y in zip(ours, theirs, strict=True)
        ]
        return sum(squares[1:], squares[0]) / len(squares)


@dataclass(frozen=True, kw_only=True)
class HiddenCosine:
    """One minus the cosine of states, averaged over layer pairs."""

    pairs: LayerPairs
    weight: Schedule = 1.0
    teacher: int = 0

    def values(
        self, student: States, teacher: States, projectors: Projectors = ()
    ) -> Float[Array, "batch seq"]:
        """One minus the cosine at every position, from 0 to 2."""
        ours, theirs = _projected(self.pairs, student, teacher, projectors)
        # Half the squared distance of unit vectors: exactly 0 for equal states, which
        # 1 - cos is not in float32.
        gaps = [
            jnp.sum(jnp.square(_unit(x) - _unit(y)), axis=-1) / 2
            for x, y in zip(ours, theirs, strict=True)
        ]
        return sum(gaps[1:], gaps[0]) / len(gaps)


@dataclass(frozen=True, kw_only=True)
class Relation:
    """KL of the rows of softmax(X X' / sqrt(dim)), teacher to student.

    X are queries, keys, values or hidden states; both sides are split anew into `heads`
    heads, so widths and head counts may differ. Wang et al., "MiniLMv2: Multi-Head
    Self-Attention Relation Distillation for Compressing Pretrained Transformers"
    (2021), section 3. Compares only positions that may see each other: see
    `visible_pairs`.
    """

    pairs: LayerPairs
    heads: int
    weight: Schedule = 1.0
    teacher: int = 0

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"Relation.heads must be at least 1, got {self.heads}")

    def values(
        self, student: States, teacher: States, visible: Bool[Array, "batch seq seq"]
    ) -> Float[Array, "batch seq"]:
        """The KL of every row, averaged over heads and layer pairs."""
        _check_count(self.pairs, student, teacher)
        rows = [
            self._rows(x, lax.stop_gradient(y), visible)
            for x, y in zip(student, teacher, strict=True)
        ]
        return sum(rows[1:], rows[0]) / len(rows)

    def _rows(self, x: Array, y: Array, visible: Array) -> Array:
        seen = _rows_seen(visible)[:, None]
        a = log_softmax(jnp.where(seen, self._scores(y), -jnp.inf))
        s = log_softmax(jnp.where(seen, self._scores(x), -jnp.inf))
        rows = jnp.mean(ForwardKL().between(a, s), axis=1)
        return jnp.where(jnp.any(visible, axis=-1), rows, 0)

    def _scores(self, x: Array) -> Array:
        if x.shape[-1] % self.heads:
            raise ValueError(
                f"Relation.heads must divide both widths, got {self.heads} heads for "
                f"a width of {x.shape[-1]}"
            )
        split = rearrange(
            widened(x), "batch seq (heads dim) -> batch heads seq dim", heads=self.heads
        )
        scores = jnp.einsum("bhqd,bhkd->bhqk", split, split)
        return scores / jnp.sqrt(jnp.asarray(split.shape[-1], scores.dtype))


@dataclass(frozen=True, kw_only=True)
class AttentionMap:
    """Squared distance of attention maps, averaged over heads and visible keys.

    Maps are [batch, heads, queries, keys], probabilities or scores before the softmax
    (Jiao et al., "TinyBERT: Distilling BERT for Natural Language Understanding" (2020),
    section 3.1, takes the scores). They need an attention that keeps its map: fused
    kernels never make one. Where head counts differ, `mean_heads` compares the means.
    A model leaves its scores; what is compared in training is their softmax unless
    `scores` is set.
    """

    pairs: LayerPairs
    weight: Schedule = 1.0
    mean_heads: bool = False
    scores: bool = False
    teacher: int = 0

    def read(
        self, found: Sequence[Float[Array, "batch _ seq seq"]]
    ) -> list[Float[Array, "batch _ seq seq"]]:
        """What is compared, of scores as models leave them: those, or their softmax."""
        if self.scores:
            return list(found)
        return [jax.nn.softmax(widened(one), axis=-1) for one in found]

    def values(
        self,
        student: Sequence[Float[Array, "batch _ seq seq"]],
        teacher: Sequence[Float[Array, "batch _ seq seq"]],
        visible: Bool[Array, "batch seq seq"],
    ) -> Float[Array, "batch seq"]:
        """The mean squared distance of every query's row."""
        _check_count(self.pairs, student, teacher)
        rows = [
            self._rows(x, lax.stop_gradient(y), visible)
            for x, y in zip(student, teacher, strict=True)
        ]
        return sum(rows[1:], rows[0]) / len(rows)

    def _rows(self, x: Array, y: Array, visible: Array) -> Array:
        if not self.mean_heads and x.shape[1] != y.shape[1]:
            raise ValueError(
                f"attention maps of {x.shape[1]} and {y.shape[1]} heads do not pair; "
                "set mean_heads=True, or use Relation, which splits heads anew"
            )
        seen = visible[:, None]
        x, y = (jnp.where(seen, widened(side), 0) for side in (x, y))
        if self.mean_heads:
            x, y = (jnp.mean(side, axis=1, keepdims=True) for side in (x, y))
        squares = jnp.sum(jnp.mean(jnp.square(x - y), axis=1), axis=-1)
        return squares / jnp.maximum(jnp.sum(visible, axis=-1), 1).astype(squares.dtype)


def visible_pairs(
    mask: Bool[Array, "batch seq"],
    segment_ids: Int[Array, "batch seq"] | None = None,
    *,
    causal: bool = False,
) -> Bool[Array, "batch seq seq"]:
    """Which queries (rows) see which keys (columns): both real, and of one document."""
    visible = mask[:, :, None] & mask[:, None, :]
    if segment_ids is not None:
        visible &= segment_ids[:, :, None] == segment_ids[:, None, :]
    if causal:
        length = mask.shape[1]
        visible &= jnp.tril(jnp.ones((1, length, length), bool))
    return visible


def _projected(
    pairs: LayerPairs, student: States, teacher: States, projectors: Projectors
) -> tuple[list[Array], list[Array]]:
    _check_count(pairs, student, teacher)
    maps = list(projectors) or [None] * len(pairs)
    ours = [
        widened(x) if w is None else widened(x) @ w.astype(widened(x).dtype)
        for x, w in zip(student, maps, strict=True)
    ]
    theirs = [lax.stop_gradient(widened(y)) for y in teacher]
    faults = [
        f"{pair}: {x.shape[-1]} and {y.shape[-1]}"
        for pair, x, y in zip(pairs, ours, theirs, strict=True)
        if x.shape != y.shape
    ]
    if faults:
        raise ValueError(
            "paired states must have one width; give a projector for the layer pairs "
            + ", ".join(faults)
        )
    return ours, theirs


def _check_count(
    pairs: LayerPairs, student: Sequence[object], teacher: Sequence[object]
) -> None:
    if not len(pairs) == len(student) == len(teacher) or not pairs:
        raise ValueError(
            f"{len(pairs)} layer pairs need as many states of each side, got "
            f"{len(student)} of the student and {len(teacher)} of the teacher"
        )


def _rows_seen(visible: Array) -> Array:
    # A padded query sees nothing; it looks at everything instead, so that its softmax
    # is one, and is dropped after.
    return visible | ~jnp.any(visible, axis=-1, keepdims=True)


def _unit(x: Array) -> Array:
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    # A state of zeros has no direction: it stays zero, with a gradient of zero.
    some = square > 0
    return jnp.where(some, x * lax.rsqrt(jnp.where(some, square, 1)), 0)
