"""Losses between hidden states, their relations, and attention maps of two models.

States are [batch, seq, embed] in pairs of layers, student first. Layer `i` is the
output of block `i` before any final norm, and the number of blocks itself is the state
after that norm. Projectors are arrays of the run, not of the model: an export never
holds one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from dew.losses.divergences import ForwardKL
from dew.losses.logspace import log_softmax, widened
from dew.losses.term import Reads, StateInputs, Term

LayerPairs = tuple[tuple[int, int], ...]


def even_layers(student: int, teacher: int) -> LayerPairs:
    """Pairs the student's block i of Ls with the teacher's block round(i * Lt / Ls).

    Counted from one in that formula and from zero in the result, so the last blocks
    always pair; all are states before the final norm.

    >>> even_layers(3, 6)
    ((0, 1), (1, 3), (2, 5))

    Raises:
        ValueError: the student has no blocks, or more than the teacher.
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
    """Draws a matrix between two widths that keeps the scale of the states."""
    return jax.random.normal(key, (student, teacher)) / jnp.sqrt(student)


@dataclass(frozen=True, kw_only=True)
class StateTerm(Term[StateInputs]):
    """A term between paired layers of the student and of one teacher.

    Attributes:
        metric: the name under which the term is logged, before its number.
        projects: whether states of unequal width get a projector that is trained.
        pairs: (student layer, teacher layer) of every pair.
        teacher: the number of the teacher, counted from 0.
    """

    metric: ClassVar[str]
    projects: ClassVar[bool] = False

    pairs: LayerPairs
    teacher: int = 0

    def compared(self, states: Sequence[Array]) -> Sequence[Array]:
        """Returns a side's block outputs as the term compares them: here, as stored."""
        return states


@dataclass(frozen=True, kw_only=True)
class HiddenMSE(StateTerm):
    """Mean squared distance of hidden states over features and layer pairs.

    A mean over features does not grow with the width. A projected student state is
    compared with the teacher's as it is.
    """

    reads: ClassVar[Reads] = "hidden"
    metric: ClassVar[str] = "hidden"
    projects: ClassVar[bool] = True

    def values(self, inputs: StateInputs) -> Float[Array, "batch seq"]:
        """Returns the mean squared distance at every position."""
        squares = [
            jnp.mean(jnp.square(x - y), axis=-1)
            for x, y in _projected(self.pairs, inputs)
        ]
        return sum(squares[1:], squares[0]) / len(squares)


@dataclass(frozen=True, kw_only=True)
class HiddenCosine(StateTerm):
    """One minus the cosine of hidden states, averaged over layer pairs."""

    reads: ClassVar[Reads] = "hidden"
    metric: ClassVar[str] = "hidden"
    projects: ClassVar[bool] = True

    def values(self, inputs: StateInputs) -> Float[Array, "batch seq"]:
        """Returns one minus the cosine at every position, from 0 to 2."""
        # Half the squared distance of unit vectors: exactly 0 for equal states, which
        # 1 - cos is not in float32.
        gaps = [
            jnp.sum(jnp.square(_unit(x) - _unit(y)), axis=-1) / 2
            for x, y in _projected(self.pairs, inputs)
        ]
        return sum(gaps[1:], gaps[0]) / len(gaps)


@dataclass(frozen=True, kw_only=True)
class Relation(StateTerm):
    """KL of the rows of softmax(X X' / sqrt(dim)), from teacher to student.

    X are queries, keys, values or hidden states; both sides are split anew into `heads`
    heads, so widths and head counts may differ. Wang et al., "MiniLMv2: Multi-Head
    Self-Attention Relation Distillation for Compressing Pretrained Transformers"
    (2021), section 3. Compares only positions that may attend to each other: see
    `visible_pairs`.
    """

    reads: ClassVar[Reads] = "hidden"
    metric: ClassVar[str] = "relation"
    whole_sequence: ClassVar[bool] = True

    heads: int

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"Relation.heads must be at least 1, got {self.heads}")

    def values(self, inputs: StateInputs) -> Float[Array, "batch seq"]:
        """Returns the KL of every row, averaged over heads and layer pairs."""
        visible = _checked(self, inputs)
        rows = [
            self._rows(x, lax.stop_gradient(y), visible)
            for x, y in zip(inputs.student, inputs.teacher, strict=True)
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
class AttentionMap(StateTerm):
    """Squared distance of attention maps, averaged over heads and visible keys.

    Maps are [batch, heads, queries, keys], probabilities or scores before the softmax
    (Jiao et al., "TinyBERT: Distilling BERT for Natural Language Understanding" (2020),
    section 3.1, takes the scores). They need an attention that materialises its map:
    fused kernels never do. Where head counts differ, `mean_heads` compares the means.
    A model stores its scores; a distillation compares their softmax unless `scores` is
    set.
    """

    reads: ClassVar[Reads] = "attention"
    metric: ClassVar[str] = "attention"
    whole_sequence: ClassVar[bool] = True

    mean_heads: bool = False
    scores: bool = False

    def compared(
        self, states: Sequence[Float[Array, "batch _ seq seq"]]
    ) -> Sequence[Float[Array, "batch _ seq seq"]]:
        """Returns the attention scores of the paired layers, or their softmax."""
        if self.scores:
            return states
        return [jax.nn.softmax(widened(x), axis=-1) for x in states]

    def values(self, inputs: StateInputs) -> Float[Array, "batch seq"]:
        """Returns the mean squared distance of every query's row."""
        visible = _checked(self, inputs)
        rows = [
            self._rows(x, lax.stop_gradient(y), visible)
            for x, y in zip(inputs.student, inputs.teacher, strict=True)
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
    """Returns which queries (rows) may attend to which keys (columns).

    Both must be real tokens of one document, and with `causal` the key not later than
    the query.
    """
    visible = mask[:, :, None] & mask[:, None, :]
    if segment_ids is not None:
        visible &= segment_ids[:, :, None] == segment_ids[:, None, :]
    if causal:
        length = mask.shape[1]
        visible &= jnp.tril(jnp.ones((1, length, length), bool))
    return visible


def _projected(pairs: LayerPairs, inputs: StateInputs) -> list[tuple[Array, Array]]:
    """Returns the states of each pair in one width, the teacher's without gradient."""
    _check_count(pairs, inputs)
    projectors = list(inputs.projectors) or [None] * len(pairs)
    sides = [
        (
            widened(x) if w is None else widened(x) @ w.astype(widened(x).dtype),
            lax.stop_gradient(widened(y)),
        )
        for x, y, w in zip(inputs.student, inputs.teacher, projectors, strict=True)
    ]
    faults = [
        f"{pair}: {x.shape[-1]} and {y.shape[-1]}"
        for pair, (x, y) in zip(pairs, sides, strict=True)
        if x.shape != y.shape
    ]
    if faults:
        raise ValueError(
            "paired states must have one width; give a projector for the layer pairs "
            + ", ".join(faults)
        )
    return sides


def _checked(term: StateTerm, inputs: StateInputs) -> Bool[Array, "batch seq seq"]:
    """Returns which keys are visible, after a check of the counts."""
    _check_count(term.pairs, inputs)
    if inputs.visible is None:
        raise ValueError(f"{type(term).__name__} needs `visible`, got None")
    return inputs.visible


def _check_count(pairs: LayerPairs, inputs: StateInputs) -> None:
    if not len(pairs) == len(inputs.student) == len(inputs.teacher) or not pairs:
        raise ValueError(
            f"{len(pairs)} layer pairs need as many states of each side, got "
            f"{len(inputs.student)} of the student and {len(inputs.teacher)} of the "
            "teacher"
        )


def _rows_seen(visible: Array) -> Array:
    # A padded query sees no key. It gets all of them instead, so that its softmax sums
    # to one, and its row is dropped afterwards.
    return visible | ~jnp.any(visible, axis=-1, keepdims=True)


def _unit(x: Array) -> Array:
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    # A state of zeros has no direction: it stays zero, with a gradient of zero.
    some = square > 0
    return jnp.where(some, x * lax.rsqrt(jnp.where(some, square, 1)), 0)
