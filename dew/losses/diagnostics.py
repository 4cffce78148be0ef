"""Diagnostics of a distillation, as terms of weight zero.

They are computed in the same pass as the losses, over the same positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dew.losses.divergences import CrossEntropy
from dew.losses.scores import PairedScores, paired_scores, soft_cross_entropy
from dew.losses.term import Schedule, Term, TermInputs


@dataclass(frozen=True, kw_only=True)
class Agreement(Term[TermInputs]):
    """Top-1 agreement: 1 where both sides rank the same token first, else 0."""

    needs_scores: ClassVar[type | None] = PairedScores

    weight: Schedule = 0.0

    def values(self, inputs: TermInputs) -> Float[Array, "*batch"]:
        """Returns the agreement of every position, as float32."""
        student = lax.stop_gradient(inputs.student)
        teacher = paired_scores(self, inputs.teacher)
        first, second = teacher.argmax_tokens(student)
        return (first == second).astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class MassOnTop(Term[TermInputs]):
    """The student's probability mass on the teacher's `k` likeliest tokens.

    All tokens where there are fewer, with a mass of 1.
    """

    needs_scores: ClassVar[type | None] = PairedScores

    k: int
    weight: Schedule = 0.0

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"MassOnTop.k must be at least 1, got {self.k}")

    def values(self, inputs: TermInputs) -> Float[Array, "*batch"]:
        """Returns a mass from 0 to 1 for every position."""
        student = lax.stop_gradient(inputs.student)
        teacher = paired_scores(self, inputs.teacher)
        _, s = teacher.paired_log_probs(student, 1.0, self.k)
        return jnp.sum(jnp.exp(s[..., :-1]), axis=-1)


@dataclass(frozen=True, kw_only=True)
class EntropyGap(Term[TermInputs]):
    """The student's entropy less the teacher's: above 0 the student is less sure."""

    needs_scores: ClassVar[type | None] = PairedScores

    weight: Schedule = 0.0

    def values(self, inputs: TermInputs) -> Float[Array, "*batch"]:
        """Returns nats per position; of the merged classes for a sparse teacher."""
        student = lax.stop_gradient(inputs.student)
        teacher = paired_scores(self, inputs.teacher)
        a, s = teacher.paired_log_probs(student, 1.0)
        return soft_cross_entropy(s, s) - soft_cross_entropy(a, a)


@dataclass(frozen=True, kw_only=True)
class TeacherCrossEntropy(Term[TermInputs]):
    """The teacher's own loss on the labels; the exponential is its perplexity."""

    needs_scores: ClassVar[type | None] = PairedScores
    needs_labels: ClassVar[bool] = True

    weight: Schedule = 0.0

    def values(self, inputs: TermInputs) -> Float[Array, "*batch"]:
        """Returns minus log p of the label at every position.

        Raises:
            ValueError: the teacher does not score all classes of the student.
        """
        student = lax.stop_gradient(inputs.student)
        teacher = paired_scores(self, inputs.teacher)
        a, _ = teacher.paired_log_probs(student, 1.0)
        if a.shape[-1] != student.shape[-1]:
            raise ValueError(
                f"TeacherCrossEntropy needs all {student.shape[-1]} classes of the "
                f"student, the teacher gives {a.shape[-1]}; leave it out"
            )
        return CrossEntropy().values(TermInputs(a, labels=inputs.labels))


@dataclass(frozen=True)
class Monitored(Term[TermInputs]):
    """Any term without its gradient: a value that is only logged.

    Cutting the gradient at the student spares the term's backward pass.
    """

    term: Term
    weight: Schedule = field(default=0.0, kw_only=True)

    def values(self, inputs: TermInputs) -> Float[Array, "*batch"]:
        """Returns the values of the term, with no gradient."""
        student = lax.stop_gradient(inputs.student)
        return self.term.values(replace(inputs, student=student))


def perplexities(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns perplexities of both sides from their logged mean cross-entropies.

    Computed from the pooled means, because means of perplexities do not pool.
    """
    nats = {"student": "watch/cross_entropy", "teacher": "watch/teacher_cross_entropy"}
    return {
        f"{side}_perplexity": math.exp(metrics[name])
        for side, name in nats.items()
        if name in metrics
    }
