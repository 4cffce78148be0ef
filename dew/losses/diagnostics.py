"""What to watch while distilling, in the form of terms with no weight.

They are computed in the same pass as the losses, over the same positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dew.losses.divergences import CrossEntropy
from dew.losses.scores import Scores, soft_cross_entropy
from dew.losses.term import Schedule, Term


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """1 where teacher and student put the same token first, else 0."""

    weight: Schedule = 0.0

    def values(
        self,
        student: Float[Array, "*batch vocab"],
        teacher: Scores,
        *,
        labels: Int[Array, "*batch"] | None = None,
        mask: Bool[Array, "*batch"] | None = None,
        step: int | Int[Array, ""] = 0,
    ) -> Float[Array, "*batch"]:
        """Top-1 agreement of every position."""
        theirs, ours = teacher.argmax_tokens(lax.stop_gradient(student))
        return (theirs == ours).astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class MassOnTop:
    """The student's mass on the `k` tokens that the teacher finds likeliest."""

    k: int
    weight: Schedule = 0.0

    def values(
        self,
        student: Float[Array, "*batch vocab"],
        teacher: Scores,
        *,
        labels: Int[Array, "*batch"] | None = None,
        mask: Bool[Array, "*batch"] | None = None,
        step: int | Int[Array, ""] = 0,
    ) -> Float[Array, "*batch"]:
        """From 0 to 1 at every position."""
        _, s = teacher.paired_log_probs(lax.stop_gradient(student), 1.0, self.k)
        return jnp.sum(jnp.exp(s[..., :-1]), axis=-1)


@dataclass(frozen=True, kw_only=True)
class EntropyGap:
    """The student's entropy less the teacher's: above 0 the student is less sure."""

    weight: Schedule = 0.0

    def values(
        self,
        student: Float[Array, "*batch vocab"],
        teacher: Scores,
        *,
        labels: Int[Array, "*batch"] | None = None,
        mask: Bool[Array, "*batch"] | None = None,
        step: int | Int[Array, ""] = 0,
    ) -> Float[Array, "*batch"]:
        """Nats at every position; of the merged classes where the teacher is sparse."""
        a, s = teacher.paired_log_probs(lax.stop_gradient(student), 1.0)
        return soft_cross_entropy(s, s) - soft_cross_entropy(a, a)


@dataclass(frozen=True, kw_only=True)
class TeacherCrossEntropy:
    """The teacher's own loss on the labels; its exponential is its perplexity."""

    weight: Schedule = 0.0

    def values(
        self,
        student: Float[Array, "*batch vocab"],
        teacher: Scores,
        *,
        labels: Int[Array, "*batch"] | None = None,
        mask: Bool[Array, "*batch"] | None = None,
        step: int | Int[Array, ""] = 0,
    ) -> Float[Array, "*batch"]:
        """Minus log p of the label. Needs full scores over the student's tokens."""
        a, _ = teacher.paired_log_probs(lax.stop_gradient(student), 1.0)
        if a.shape[-1] != student.shape[-1]:
            raise ValueError(
                f"TeacherCrossEntropy needs all {student.shape[-1]} classes of the "
                f"student, the teacher gives {a.shape[-1]}; leave it out"
            )
        return CrossEntropy().values(a, labels=labels)


@dataclass(frozen=True)
class Monitored:
    """Any term, cut off from the student: a value to look at, and no gradient."""

    term: Term
    weight: Schedule = 0.0

    def values(
        self,
        student: Float[Array, "*batch vocab"],
        teacher: Scores,
        *,
        labels: Int[Array, "*batch"] | None = None,
        mask: Bool[Array, "*batch"] | None = None,
        step: int | Int[Array, ""] = 0,
    ) -> Float[Array, "*batch"]:
        """The term's own."""
        still = lax.stop_gradient(student)
        return self.term.values(still, teacher, labels=labels, mask=mask, step=step)


def perplexities(metrics: Mapping[str, float]) -> dict[str, float]:
    """Perplexities, from logged means of the two cross-entropies; means do not pool."""
    nats = {"student": "watch/cross_entropy", "teacher": "watch/teacher_cross_entropy"}
    return {
        f"{side}_perplexity": math.exp(metrics[name])
        for side, name in nats.items()
        if name in metrics
    }
