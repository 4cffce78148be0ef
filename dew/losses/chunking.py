"""Sums of token losses that never hold the logits of a whole batch.

The sequence is cut into chunks. Each chunk's logits are made, scored and dropped, and
made again in the backward pass. Chunks lie along the sequence, so every device keeps
its own rows, and sums are carried in float32 or wider: the number of chunks changes
neither the value nor the gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from dew.losses.logspace import widened
from dew.losses.scores import DenseScores, Scores
from dew.losses.sparse_scores import SampledScores, TopKScores
from dew.losses.term import Term
from dew.losses.vocabulary import VocabularyMap

Sums = TypeVar("Sums")


class TokenSource(Protocol):
    """Something that gives scores for any stretch of the sequence.

    `held` is needed for every stretch; the leaves of `tokens` start with batch and seq.
    """

    @property
    def held(self) -> Any:
        """What every stretch needs, as the weights of a head."""
        ...

    @property
    def tokens(self) -> Any:
        """What belongs to single tokens."""
        ...

    def scores(self, held: Any, tokens: Any) -> Scores:
        """The scores of the stretch whose tokens these are."""
        ...


@struct.dataclass
class MaterialisedScores:
    """Scores that exist already: logits, a cache's top k, or drawn tokens."""

    tokens: DenseScores | TopKScores | SampledScores

    @property
    def held(self) -> tuple[()]:
        """Nothing."""
        return ()

    def scores(self, held: Any, tokens: Any) -> Any:
        """The stretch itself."""
        return tokens


@struct.dataclass
class LazyLogits:
    """Hidden states whose logits are made when they are needed: `unembed(held, final)`.

    `unembed` is the model's own, so that its softcap, scale, norm and bias are in.
    """

    held: Any
    tokens: Float[Array, "batch seq embed"]
    unembed: Callable[[Any, Any], Any] = struct.field(pytree_node=False)
    vocabulary: VocabularyMap | None = struct.field(pytree_node=False, default=None)

    def scores(self, held: Any, tokens: Any) -> DenseScores:
        """The stretch's logits."""
        return DenseScores(
            logits=self.unembed(held, tokens), vocabulary=self.vocabulary
        )


@struct.dataclass
class CrossTokenizerScores:
    """Scores of other positions than the student's, which no stretch can be cut from.

    They are held whole, so `chunk` must be None beside them.
    """

    held: Any

    @property
    def tokens(self) -> tuple[()]:
        """Nothing belongs to single tokens of the student."""
        return ()

    def scores(self, held: Any, tokens: Any) -> Any:
        """All of them."""
        return held


def term_sums(
    terms: Sequence[Term],
    student: MaterialisedScores | LazyLogits,
    teacher: MaterialisedScores | LazyLogits | CrossTokenizerScores,
    *,
    weights: Float[Array, "batch seq"],
    labels: Int[Array, "batch seq"] | None = None,
    step: int | Int[Array, ""] = 0,
    chunk: int | None = None,
) -> tuple[Float[Array, ""], ...]:
    """Each term's values summed with the weights of their positions, before its weight.

    A position of weight 0 is masked on the *inputs*: whatever it holds, NaN included,
    reaches neither a value nor a gradient. No gradient reaches the teacher.

    Args:
        terms: what to compute; one pass serves them all.
        student: logits, or hidden states with the student's output embedding.
        teacher: scores of the same positions in any form.
        weights: what each position counts for; 0 masks it.
        labels: the tokens that the positions predict, where a term asks for them.
        step: what the terms' schedules are read at.
        chunk: positions of the sequence at a time; None takes all at once.
    """
    tokens = {
        "student": student.tokens,
        "teacher": lax.stop_gradient(teacher.tokens),
        "weights": weights,
        "labels": labels,
    }
    held = (student.held, lax.stop_gradient(teacher.held))

    def sums(held: Any, part: dict[str, Any]) -> tuple[Array, ...]:
        live = part["weights"] > 0
        part = jax.tree.map(lambda leaf: _masked(live, leaf), part)
        logits = student.scores(held[0], part["student"]).logits
        scores = teacher.scores(held[1], part["teacher"])
        values = [
            term.values(logits, scores, labels=part["labels"], mask=live, step=step)
            for term in terms
        ]
        return tuple(jnp.sum(part["weights"].astype(v.dtype) * v) for v in values)

    return sum_over_chunks(sums, held, tokens, chunk=chunk)


def sum_over_chunks(
    fn: Callable[[Any, Any], Sums], held: Any, tokens: Any, *, chunk: int | None
) -> Sums:
    """The sum over chunks of `fn(held, chunk of tokens)`, a tree of scalars.

    A last chunk that is shorter is taken as it is. `held` is carried in float32, so
    that the gradient of a bfloat16 head is not rounded once per chunk, and given to
    `fn` in its own dtype.

    Args:
        fn: sums over the stretch that it is given.
        held: what every chunk needs.
        tokens: leaves that start with batch and seq.
        chunk: positions at a time; None, or no fewer than there are, calls `fn` once.

    Raises:
        ValueError: `chunk` is less than 1.
    """
    length = jax.tree.leaves(tokens)[0].shape[1]
    if chunk is None or chunk >= length:
        return fn(held, tokens)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 position, got {chunk}")
    dtypes = jax.tree.map(lambda leaf: jnp.result_type(leaf), held)
    wide = jax.tree.map(_wide_if_float, held)

    def narrow(wide: Any, part: Any) -> Sums:
        own = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), wide, dtypes)
        return fn(own, part)

    # In a scan nothing can be merged with the forward pass, so CSE needs no barrier.
    body = jax.checkpoint(narrow, prevent_cse=False)
    whole = length // chunk * chunk

    def add(sums: Sums, part: Any) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, sums, body(wide, part)), None

    parts = jax.tree.map(lambda leaf: _cut(leaf[:, :whole], chunk), tokens)
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    shapes = jax.eval_shape(narrow, wide, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    sums, _ = lax.scan(add, zeros, parts)
    if whole == length:
        return sums
    ragged = jax.tree.map(lambda leaf: leaf[:, whole:], tokens)
    return jax.tree.map(jnp.add, sums, jax.checkpoint(narrow)(wide, ragged))


def sequence_weights(weights: Float[Array, "batch seq"]) -> Float[Array, "batch seq"]:
    """Weights under which a sum of token losses is a sum of sequence means.

    The mass of such a sum is the number of sequences that count at all.
    """
    wide = widened(weights)
    whole = jnp.sum(wide, axis=1, keepdims=True)
    return jnp.where(whole > 0, wide / jnp.where(whole > 0, whole, 1), 0)


def _masked(live: Array, leaf: Array) -> Array:
    shape = (*live.shape, *[1] * (leaf.ndim - live.ndim))
    return jnp.where(live.reshape(shape), leaf, jnp.zeros((), leaf.dtype))


def _cut(leaf: Array, chunk: int) -> Array:
    batch, length, *rest = leaf.shape
    return jnp.moveaxis(leaf.reshape(batch, length // chunk, chunk, *rest), 1, 0)


def _wide_if_float(leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    return widened(array) if jnp.issubdtype(array.dtype, jnp.floating) else array
