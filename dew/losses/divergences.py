"""Distances between a teacher's and a student's next-token distributions.

P is the teacher, Q the student, in every name and formula here. With `t_squared` a
value is multiplied by the temperature squared, which keeps the gradient's size as the
temperature moves: Hinton et al., "Distilling the Knowledge in a Neural Network" (2015),
section 2. The factor is in the value *and* so in the gradient.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dew.losses.logspace import (
    Scalar,
    log_mixture_ratio,
    log_ratio,
    log_softmax,
    relative_entropy,
)
from dew.losses.scores import (
    PairedScores,
    SoftTargets,
    paired_scores,
    soft_targets,
)
from dew.losses.term import Schedule, Term, TermInputs, at, check_positive, check_share

LogProbs = Float[Array, "*batch classes"]


@dataclass(frozen=True, kw_only=True)
class Divergence(Term[TermInputs]):
    """A term that compares log-probabilities class by class.

    `top` compares only the teacher's likeliest classes and one bucket of all others;
    all classes where there are no more.
    """

    needs_scores: ClassVar[type | None] = PairedScores

    temperature: Schedule = 1.0
    t_squared: bool = True
    top: int | None = None

    def __post_init__(self) -> None:
        check_positive(self, "temperature", self.temperature)
        if self.top is not None and self.top < 1:
            name = type(self).__name__
            raise ValueError(f"{name}.top must be None or at least 1, got {self.top}")

    @abstractmethod
    def between(
        self, a: LogProbs, s: LogProbs, step: int | Int[Array, ""] = 0
    ) -> Float[Array, "*batch"]:
        """The divergence of teacher log-probabilities `a` and student ones `s`."""

    def values(self, inputs: TermInputs) -> Float[Array, "*batch"]:
        """The divergence of every position."""
        temperature = at(self.temperature, inputs.step)
        teacher = paired_scores(self, inputs.teacher)
        a, s = teacher.paired_log_probs(inputs.student, temperature, self.top)
        values = self.between(a, s, inputs.step)
        return _tempered(values, temperature, self.t_squared)


@dataclass(frozen=True, kw_only=True)
class ForwardKL(Divergence):
    """KL(P/Q): the sum of p (log p - log q). Covers every mode of the teacher.

    >>> from dew.losses import DenseScores, TermInputs
    >>> teacher = DenseScores(jnp.log(jnp.asarray([[0.5, 0.5]])))
    >>> student = jnp.log(jnp.asarray([[0.25, 0.75]]))
    >>> [round(float(x), 4) for x in ForwardKL().values(TermInputs(student, teacher))]
    [0.1438]
    """

    def between(
        self, a: LogProbs, s: LogProbs, step: int | Int[Array, ""] = 0
    ) -> Float[Array, "*batch"]:
        """KL from teacher to student."""
        return relative_entropy(jnp.exp(a), jnp.exp(s), log_ratio(s, a))


@dataclass(frozen=True, kw_only=True)
class ReverseKL(Divergence):
    """KL(Q/P): the sum of q (log q - log p). Seeks the teacher's modes.

    >>> from dew.losses import DenseScores, TermInputs
    >>> teacher = DenseScores(jnp.log(jnp.asarray([[0.5, 0.5]])))
    >>> student = jnp.log(jnp.asarray([[0.25, 0.75]]))
    >>> [round(float(x), 4) for x in ReverseKL().values(TermInputs(student, teacher))]
    [0.1308]
    """

    def between(
        self, a: LogProbs, s: LogProbs, step: int | Int[Array, ""] = 0
    ) -> Float[Array, "*batch"]:
        """KL from student to teacher."""
        return relative_entropy(jnp.exp(s), jnp.exp(a), log_ratio(a, s))


@dataclass(frozen=True, kw_only=True)
class ScaledJSD(Divergence):
    """Jensen-Shannon divergence of M = beta P + (1 - beta) Q, over beta (1 - beta).

    Continuous: beta 0 is the forward KL, 1 the reverse KL, and beta <-> 1 - beta with P
    and Q swapped changes nothing. `raw` leaves the division out, as TRL, Liger and
    ms-swift do; their value then falls to 0 near both ends.
    """

    beta: Schedule = 0.5
    raw: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "beta", self.beta)

    def between(
        self, a: LogProbs, s: LogProbs, step: int | Int[Array, ""] = 0
    ) -> Float[Array, "*batch"]:
        """KL(P/M) / (1 - beta) + KL(Q/M) / beta, or beta (1 - beta) times that."""
        beta = jnp.asarray(at(self.beta, step), a.dtype)
        from_teacher, from_student = _to_mixture(a, s, beta)
        if self.raw:
            return beta * from_teacher + (1 - beta) * from_student
        # At an end one KL is to M = the other side and its partner is zero over zero.
        left = jnp.where(beta < 1, from_teacher / jnp.where(beta < 1, 1 - beta, 1), 0)
        right = jnp.where(beta > 0, from_student / jnp.where(beta > 0, beta, 1), 0)
        return left + right


@dataclass(frozen=True, kw_only=True)
class SkewKL(Divergence):
    """KL to a mixture that holds `skew` of its own first argument, so it is bounded.

    Forward is KL(P / skew P + (1 - skew) Q), reverse is KL(Q / (1 - skew) P + skew Q);
    both are at most -log(skew), and the plain KL at skew 0. Ko et al., "DistiLLM:
    Towards Streamlined Distillation for Large Language Models" (2024), section 3.
    """

    skew: Schedule = 0.1
    direction: Literal["forward", "reverse"] = "forward"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "skew", self.skew)

    def between(
        self, a: LogProbs, s: LogProbs, step: int | Int[Array, ""] = 0
    ) -> Float[Array, "*batch"]:
        """The skewed KL in the chosen direction."""
        skew = jnp.asarray(at(self.skew, step), a.dtype)
        if self.direction == "forward":
            return _to_mixture(a, s, skew)[0]
        return _to_mixture(s, a, skew)[0]


@dataclass(frozen=True, kw_only=True)
class TVD(Divergence):
    """Half the sum of |p - q|: at most 1. Its gradient falls as 1/T only."""

    t_squared: bool = False

    def between(
        self, a: LogProbs, s: LogProbs, step: int | Int[Array, ""] = 0
    ) -> Float[Array, "*batch"]:
        """Total variation distance of the two distributions, between 0 and 1."""
        return jnp.sum(jnp.abs(jnp.exp(a) - jnp.exp(s)), axis=-1) / 2


@dataclass(frozen=True, kw_only=True)
class TopKTail(Term[TermInputs]):
    """Forward KL of the teacher's `k` likeliest classes, and a policy for the rest.

    `bucket` (the default) makes all others one class on both sides: always a lower
    bound of the full KL, equal to it at k = vocab - 1. The other two are what other
    projects do: `teacher` renormalises the teacher over the k and tells the student
    that the tail has no mass (DistillKit, axolotl); `both` renormalises both sides, so
    that k = 1 gives 0 whatever the student says (ModelOpt, ms-swift).
    """

    needs_scores: ClassVar[type | None] = PairedScores

    k: int
    temperature: Schedule = 1.0
    t_squared: bool = True
    rest: Literal["bucket", "teacher", "both"] = "bucket"

    def __post_init__(self) -> None:
        check_positive(self, "temperature", self.temperature)
        if self.k < 1:
            raise ValueError(f"TopKTail.k must be at least 1, got {self.k}")

    def values(self, inputs: TermInputs) -> Float[Array, "*batch"]:
        """KL over k + 1 classes, or over k."""
        temperature = at(self.temperature, inputs.step)
        teacher = paired_scores(self, inputs.teacher)
        a, s = teacher.paired_log_probs(inputs.student, temperature, self.k)
        if self.rest == "teacher":
            empty = jnp.full_like(a[..., -1:], -jnp.inf)
            a = jnp.concatenate([_renormalised(a[..., :-1]), empty], axis=-1)
        elif self.rest == "both":
            a, s = _renormalised(a[..., :-1]), _renormalised(s[..., :-1])
        return _tempered(ForwardKL().between(a, s), temperature, self.t_squared)


@dataclass(frozen=True, kw_only=True)
class SoftCrossEntropy(Term[TermInputs]):
    """Minus the sum of p log q: the forward KL with the teacher's entropy left in.

    Same gradient as the forward KL; other value. alpha times this plus (1 - alpha)
    times the cross-entropy is the cross-entropy to the mixed target, at temperature 1.
    """

    needs_scores: ClassVar[type | None] = SoftTargets

    temperature: Schedule = 1.0
    t_squared: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "temperature", self.temperature)

    def values(self, inputs: TermInputs) -> Float[Array, "*batch"]:
        """The student's code length for the teacher's distribution."""
        temperature = at(self.temperature, inputs.step)
        targets = soft_targets(self, inputs.teacher)
        nats = targets.cross_entropy(inputs.student, temperature)
        return _tempered(nats, temperature, self.t_squared)


@dataclass(frozen=True, kw_only=True)
class Sampled(SoftCrossEntropy):
    """Cross-entropy to tokens drawn from the teacher (RS-KD): the sum of -w log q.

    With `SampledScores` its mean over draws is the soft cross-entropy, and the mean of
    its gradients q - p, for any proposal. With full scores it is that mean itself.
    """


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Term[TermInputs]):
    """The student's own loss on the labels, always at temperature 1."""

    needs_labels: ClassVar[bool] = True
    student_only: ClassVar[bool] = True

    def values(self, inputs: TermInputs) -> Float[Array, "*batch"]:
        """Minus log q of the label."""
        if inputs.labels is None:
            raise ValueError("CrossEntropy needs the labels of the positions, got None")
        log_q = log_softmax(inputs.student)
        return -jnp.take_along_axis(log_q, inputs.labels[..., None], axis=-1)[..., 0]


def _to_mixture(
    a: LogProbs, s: LogProbs, share: Float[Array, ""]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """KL(A/M) and KL(S/M) of M = share A + (1 - share) S."""
    p, q = jnp.exp(a), jnp.exp(s)
    m = share * p + (1 - share) * q
    # Both log-ratios from a - s itself: log M minus either would cancel near the ends.
    d = log_ratio(a, s)
    return (
        relative_entropy(p, m, log_mixture_ratio(-d, 1 - share)),
        relative_entropy(q, m, log_mixture_ratio(d, share)),
    )


def _renormalised(log_probs: LogProbs) -> LogProbs:
    return jax.nn.log_softmax(log_probs, axis=-1, where=log_probs > -jnp.inf)


def _tempered(
    values: Float[Array, "*batch"], temperature: Scalar, t_squared: bool
) -> Float[Array, "*batch"]:
    if not t_squared:
        return values
    return values * jnp.square(jnp.asarray(temperature, values.dtype))
