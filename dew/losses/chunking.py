"""Sums of token losses whose logits are never materialised for a whole batch.

The sequence is cut into chunks. Each chunk's logits are computed, scored and dropped,
and recomputed in the backward pass. Chunks lie along the sequence, so every device
keeps its own rows, and sums are carried in float32 or wider: the number of chunks
changes neither the value nor the gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree

from dew.losses.logspace import widened
from dew.losses.scores import DenseScores, Scores
from dew.losses.sparse_scores import SampledScores, TopKScores
from dew.losses.term import Term, TermInputs
from dew.losses.uld import SpanScores
from dew.losses.vocabulary import VocabularyMap

Sums = TypeVar("Sums")
Shared = TypeVar("Shared")
Tokens = TypeVar("Tokens")


@runtime_checkable
class ScoreSource(Protocol):
    """Scores of a batch that can be computed for any chunk of the sequence.

    `shared` is used by every chunk; the leaves of `tokens` start with batch and seq.
    """

    @property
    def shared(self) -> PyTree:
        """Arrays that every chunk needs, as the weights of a head."""
        ...

    @property
    def tokens(self) -> PyTree:
        """Arrays with one entry for each token, cut into chunks."""
        ...

    def chunk(self, shared: Any, tokens: Any) -> Scores:
        """Returns the scores of the chunk that holds these tokens."""
        ...


@struct.dataclass
class MaterialisedScores:
    """Scores that are in memory already: logits, a cache's top k, or drawn tokens."""

    tokens: DenseScores | TopKScores | SampledScores

    @property
    def shared(self) -> tuple[()]:
        """Arrays that every chunk needs: none."""
        return ()

    def chunk(
        self, shared: tuple[()], tokens: DenseScores | TopKScores | SampledScores
    ) -> DenseScores | TopKScores | SampledScores:
        """Returns the cut scores as they are."""
        return tokens


@struct.dataclass
class LazyLogits:
    """Final hidden states with the head that computes logits from them on demand.

    `unembed(shared, tokens)` is the model's own, so that its softcap, scale, norm and
    bias are included.
    """

    shared: PyTree
    tokens: Float[Array, "batch seq embed"]
    unembed: Callable[[Any, Any], Array] = struct.field(pytree_node=False)
    vocabulary: VocabularyMap | None = struct.field(pytree_node=False, default=None)

    def chunk(
        self, shared: PyTree, tokens: Float[Array, "batch chunk embed"]
    ) -> DenseScores:
        """Computes the logits of a chunk of hidden states."""
        return DenseScores(
            logits=self.unembed(shared, tokens), vocabulary=self.vocabulary
        )


@struct.dataclass
class CrossTokenizerScores:
    """Scores from another tokenizer, which have no common axis with the student's.

    They cannot be cut along the student's sequence, so `chunk` must be None with them.
    """

    shared: SpanScores

    @property
    def tokens(self) -> tuple[()]:
        """Arrays with one entry for each token of the student: none."""
        return ()

    def chunk(self, shared: SpanScores, tokens: tuple[()]) -> SpanScores:
        """Returns the scores of the whole sequence."""
        return shared


def whole_scores(source: ScoreSource) -> Scores:
    """Returns the scores of the whole sequence, computed in one piece."""
    return source.chunk(source.shared, source.tokens)


def term_sums(
    terms: Sequence[Term],
    student: ScoreSource,
    teacher: ScoreSource,
    *,
    weights: Float[Array, "batch seq"],
    labels: Int[Array, "batch seq"] | None = None,
    step: int | Int[Array, ""] = 0,
    chunk: int | None = None,
) -> tuple[Float[Array, ""], ...]:
    """Sums each term's values over the positions, times the weights of the positions.

    A position of weight 0 is masked on the *inputs*: whatever it holds, NaN included,
    reaches neither a value nor a gradient. No gradient reaches the teacher. The terms'
    own weights are not applied.

    Args:
        terms: terms over logits; one pass serves them all.
        student: logits, or hidden states with the student's output embedding.
        teacher: scores of the same positions in any form.
        weights: the weight of each position; 0 masks it.
        labels: the tokens that the positions predict, for terms that need them.
        step: the count of accepted micro-batches, for the terms' schedules.
        chunk: positions of the sequence at a time; None takes all at once.

    Raises:
        TypeError: the student's scores are not dense logits, or a term compares what
            the teacher's scores do not give.
    """
    tokens = {
        "student": student.tokens,
        "teacher": lax.stop_gradient(teacher.tokens),
        "weights": weights,
        "labels": labels,
    }
    shared = (student.shared, lax.stop_gradient(teacher.shared))

    def sums(shared: tuple[Any, Any], part: dict[str, Any]) -> tuple[Array, ...]:
        live = part["weights"] > 0
        part = jax.tree.map(lambda leaf: _masked(live, leaf), part)
        inputs = TermInputs(
            _logits(student.chunk(shared[0], part["student"])),
            teacher.chunk(shared[1], part["teacher"]),
            labels=part["labels"],
            mask=live,
            step=step,
        )
        values = [term.values(inputs) for term in terms]
        return tuple(jnp.sum(part["weights"].astype(v.dtype) * v) for v in values)

    return sum_over_chunks(sums, shared, tokens, chunk=chunk)


def sum_over_chunks(
    fn: Callable[[Shared, Tokens], Sums],
    shared: Shared,
    tokens: Tokens,
    *,
    chunk: int | None,
) -> Sums:
    """Sums `fn(shared, chunk of tokens)`, a tree of scalars, over the chunks.

    A last chunk that is shorter is computed at its own length. `shared` is carried in
    float32, so that the gradient of a bfloat16 head is not rounded once per chunk, and
    given to `fn` in its own dtype.

    Args:
        fn: sums over the chunk that it is given.
        shared: arrays that every chunk needs.
        tokens: a tree whose leaves start with batch and seq.
        chunk: positions at a time; None, or no fewer than there are, calls `fn` once.

    Raises:
        ValueError: `chunk` is less than 1.
    """
    length = jax.tree.leaves(tokens)[0].shape[1]
    if chunk is None or chunk >= length:
        return fn(shared, tokens)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 position, got {chunk}")
    dtypes = jax.tree.map(lambda leaf: jnp.result_type(leaf), shared)
    wide = jax.tree.map(_wide_if_float, shared)

    # Casting back inside the chunk puts the cast's transpose there too: gradients leave
    # each chunk in float32 and are added in float32 by the scan.
    def narrow(wide: Shared, part: Tokens) -> Sums:
        own = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), wide, dtypes)
        return fn(own, part)

    # In a scan nothing can be merged with the forward pass, so CSE needs no barrier.
    body = jax.checkpoint(narrow, prevent_cse=False)
    even_length = length // chunk * chunk

    def add(sums: Sums, part: Tokens) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, sums, body(wide, part)), None

    parts = jax.tree.map(lambda leaf: _cut(leaf[:, :even_length], chunk), tokens)
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    shapes = jax.eval_shape(narrow, wide, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    sums, _ = lax.scan(add, zeros, parts)
    if even_length == length:
        return sums
    # The ragged end stays outside the scan: padding it would unembed extra tokens.
    ragged = jax.tree.map(lambda leaf: leaf[:, even_length:], tokens)
    return jax.tree.map(jnp.add, sums, jax.checkpoint(narrow)(wide, ragged))


def sequence_weights(weights: Float[Array, "batch seq"]) -> Float[Array, "batch seq"]:
    """Returns weights under which a sum of token losses is a sum of sequence means.

    The total weight is then the number of sequences that have any weight.
    """
    wide = widened(weights)
    mass = jnp.sum(wide, axis=1, keepdims=True)
    return jnp.where(mass > 0, wide / jnp.where(mass > 0, mass, 1), 0)


def _logits(scores: Scores) -> Array:
    if not isinstance(scores, DenseScores):
        raise TypeError(
            f"a student must give dense logits, got {type(scores).__name__}"
        )
    return scores.logits


def _masked(live: Array, leaf: Array) -> Array:
    shape = (*live.shape, *[1] * (leaf.ndim - live.ndim))
    return jnp.where(live.reshape(shape), leaf, jnp.zeros((), leaf.dtype))


def _cut(leaf: Array, chunk: int) -> Array:
    batch, length, *rest = leaf.shape
    return jnp.moveaxis(leaf.reshape(batch, length // chunk, chunk, *rest), 1, 0)


def _wide_if_float(leaf: ArrayLike) -> Array:
    array = jnp.asarray(leaf)
    return widened(array) if jnp.issubdtype(array.dtype, jnp.floating) else array
