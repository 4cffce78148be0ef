"""A teacher's scores of tokens, and how they are compared with a student's logits.

Full logits, a cache's top k, drawn tokens and the logits of another tokenizer each
allow some comparisons and not others: a protocol for each comparison says which. The
losses are written against the protocols, never against one form of scores.
"""

from typing import Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dew.losses.logspace import Scalar, log_softmax
from dew.losses.vocabulary import VocabularyMap

Pair: TypeAlias = tuple[Float[Array, "*batch classes"], Float[Array, "*batch classes"]]
"""The teacher's and the student's log-probabilities of the same classes."""

TokenPair: TypeAlias = tuple[Int[Array, "*batch"], Int[Array, "*batch"]]
"""A class of the teacher's choice and one of the student's, at every position."""


@runtime_checkable
class PairedScores(Protocol):
    """Scores with a distribution over classes that the student has too."""

    def paired_log_probs(
        self,
        student: Float[Array, "*batch vocab"],
        temperature: Scalar,
        top: int | None = None,
    ) -> Pair:
        """Returns both sides over common classes, without a gradient to the teacher.

        With `top`, those are the teacher's likeliest classes and, last, one bucket for
        all others; where there are fewer, all of them. Merging classes never raises a
        divergence, so what is measured on the pair is a lower bound of the full one,
        and equal to it from top = vocab - 1 on.
        """
        ...

    def argmax_tokens(self, student: Float[Array, "*batch vocab"]) -> TokenPair:
        """Returns the likeliest class of the teacher, and that of the student."""
        ...


@runtime_checkable
class SoftTargets(Protocol):
    """Scores that give the expected cross-entropy of a student, at least unbiased."""

    def cross_entropy(
        self, student: Float[Array, "*batch vocab"], temperature: Scalar
    ) -> Float[Array, "*batch"]:
        """Returns minus the sum of p log q at every position, in nats."""
        ...


@runtime_checkable
class OwnProbabilities(Protocol):
    """Scores with a full distribution over the teacher's own classes."""

    def own_probs(
        self,
        student: Float[Array, "*batch vocab"],
        temperature: Scalar,
        labels: Int[Array, "*batch"] | None,
    ) -> tuple[Float[Array, "*batch _"], Float[Array, "*batch _"]]:
        """Returns the probabilities of each side over its own classes.

        `labels` are the student's; only a teacher with other tokens reads them.
        """
        ...


Scores: TypeAlias = PairedScores | SoftTargets | OwnProbabilities
"""Scores of positions in any form; every leaf starts with the axes of the positions."""


def paired_scores(term: object, scores: Scores | None) -> PairedScores:
    """Returns the scores if a term can compare distributions class by class.

    Raises:
        TypeError: the scores give no log-probabilities of common classes.
    """
    if not isinstance(scores, PairedScores):
        raise TypeError(misfit(term, PairedScores, type(scores)))
    return scores


def soft_targets(term: object, scores: Scores | None) -> SoftTargets:
    """Returns the scores if a term can take a cross-entropy to them.

    Raises:
        TypeError: the scores give no cross-entropy.
    """
    if not isinstance(scores, SoftTargets):
        raise TypeError(misfit(term, SoftTargets, type(scores)))
    return scores


def own_probabilities(term: object, scores: Scores | None) -> OwnProbabilities:
    """Returns the scores if a term can rank the teacher's own probabilities.

    Raises:
        TypeError: the scores give no full distribution.
    """
    if not isinstance(scores, OwnProbabilities):
        raise TypeError(misfit(term, OwnProbabilities, type(scores)))
    return scores


def misfit(term: object, needed: type, scores: type) -> str:
    """Returns the error message for a term that scores of a type cannot serve."""
    given = [
        f"{words} ({example})"
        for kind, words, example in COMPARISONS
        if issubclass(scores, kind)
    ]
    missing = next(words for kind, words, _ in COMPARISONS if kind is needed)
    return (
        f"{type(term).__name__} reads {missing}, and {scores.__name__} gives only "
        f"{' and '.join(given) or 'none'}"
    )


COMPARISONS: tuple[tuple[type, str, str], ...] = (
    (
        PairedScores,
        "log-probabilities of shared classes",
        "for divergences and diagnostics",
    ),
    (
        SoftTargets,
        "a cross-entropy",
        "for SoftCrossEntropy and Sampled",
    ),
    (
        OwnProbabilities,
        "full probabilities of the teacher's own classes",
        "for ULD",
    ),
)
"""Each comparison with its words in an error message and the terms that use it."""


@struct.dataclass
class DenseScores:
    """Logits of every class. Without `vocabulary` both sides have the same rows."""

    logits: Float[Array, "*batch vocab"]
    vocabulary: VocabularyMap | None = struct.field(pytree_node=False, default=None)

    def paired_log_probs(
        self,
        student: Float[Array, "*batch rows"],
        temperature: Scalar,
        top: int | None = None,
    ) -> Pair:
        """Every class that both sides have, or the teacher's `top` and the rest."""
        teacher = lax.stop_gradient(self.logits)
        if self.vocabulary is not None:
            teacher = self.vocabulary.teacher_classes(teacher, temperature)
            student = self.vocabulary.student_classes(student, temperature)
        _check_rows(teacher.shape[-1], student.shape[-1])
        a, s = log_softmax(teacher, temperature), log_softmax(student, temperature)
        if top is None:
            return a, s
        kept, ids = lax.top_k(a, clamped_k(top, a.shape[-1]))
        return bucketed(ids, kept, log_sum_outside(a, ids, kept), s)

    def cross_entropy(
        self, student: Float[Array, "*batch rows"], temperature: Scalar
    ) -> Float[Array, "*batch"]:
        """Minus the sum of p log q."""
        return soft_cross_entropy(*self.paired_log_probs(student, temperature))

    def argmax_tokens(self, student: Float[Array, "*batch rows"]) -> TokenPair:
        """The two most likely common classes."""
        a, s = self.paired_log_probs(student, 1.0)
        return jnp.argmax(a, axis=-1), jnp.argmax(s, axis=-1)

    def own_probs(
        self,
        student: Float[Array, "*batch rows"],
        temperature: Scalar,
        labels: Int[Array, "*batch"] | None,
    ) -> tuple[Float[Array, "*batch vocab"], Float[Array, "*batch rows"]]:
        """Softmax of both sides, rows as they are."""
        teacher = log_softmax(lax.stop_gradient(self.logits), temperature)
        return jnp.exp(teacher), jnp.exp(log_softmax(student, temperature))


def soft_cross_entropy(
    a: Float[Array, "*batch classes"], s: Float[Array, "*batch classes"]
) -> Float[Array, "*batch"]:
    """Minus the sum of p log q over the classes that the teacher gives any mass."""
    some = a > -jnp.inf
    return -jnp.sum(jnp.where(some, jnp.exp(a) * jnp.where(some, s, 0), 0), axis=-1)


def log_sum_outside(
    log_probs: Float[Array, "*batch vocab"],
    ids: Int[Array, "*batch k"],
    kept: Float[Array, "*batch k"],
) -> Float[Array, "*batch"]:
    """Log-mass of the classes that no used slot names; minus infinity where none is.

    Summed rather than taken from one minus the kept mass, which in float32 would leave
    a tail of 1e-5 two digits.
    """
    outside = ~_named(ids, kept > -jnp.inf, log_probs.shape[-1])
    exists = outside & (log_probs > -jnp.inf)
    some = jnp.any(exists, axis=-1)
    # Where nothing is left, sum one harmless class instead: no NaN in the gradient.
    counted = exists | ~some[..., None]
    summed = jax.nn.logsumexp(jnp.where(counted, log_probs, 0), axis=-1, where=counted)
    return jnp.where(some, summed, -jnp.inf)


def bucketed(
    ids: Int[Array, "*batch k"],
    log_probs: Float[Array, "*batch k"],
    tail: Float[Array, "*batch"],
    log_q: Float[Array, "*batch vocab"],
) -> Pair:
    """The kept classes and the bucket of all others, on both sides."""
    used = log_probs > -jnp.inf
    kept = jnp.where(used, jnp.take_along_axis(log_q, ids, axis=-1), -jnp.inf)
    rest = log_sum_outside(log_q, ids, log_probs)
    teacher = jnp.concatenate([log_probs, tail[..., None]], axis=-1)
    student = jnp.concatenate([kept, rest[..., None]], axis=-1)
    return lax.stop_gradient(teacher.astype(student.dtype)), student


def _named(
    ids: Int[Array, "*batch k"], used: Bool[Array, "*batch k"], num_classes: int
) -> Bool[Array, "*batch vocab"]:
    flat = ids.reshape(-1, ids.shape[-1])
    rows = jnp.arange(flat.shape[0])[:, None]
    named = jnp.zeros((flat.shape[0], num_classes), bool)
    named = named.at[rows, flat].max(used.reshape(flat.shape))
    return named.reshape(*ids.shape[:-1], num_classes)


def _check_rows(teacher: int, student: int) -> None:
    if teacher != student:
        raise ValueError(
            f"the teacher scores {teacher} classes and the student {student}; align "
            "them by tokenizer with dew.losses.vocabulary.align"
        )


def clamped_k(k: int, most: int) -> int:
    """Returns how many of `most` classes a top k takes: all where there are fewer.

    Raises:
        ValueError: `k` is less than 1.
    """
    if k < 1:
        raise ValueError(f"top k must be at least 1 class, got {k}")
    return min(k, most)
