"""Terms that reproduce other projects' losses, so that people can move over.

Each returns terms for `term_sums`; their weighted sum over the mass of the positions is
what the project reports on the same logits and mask. Formulas were read in the
projects' public sources in autumn 2026. Where a project's own code does something that
its users would call a fault, the docstring says so and the terms leave it out, unless
it is the definition of the loss.
"""

from dew.losses.divergences import (
    CrossEntropy,
    Divergence,
    ForwardKL,
    ReverseKL,
    ScaledJSD,
    SoftCrossEntropy,
    TopKTail,
)
from dew.losses.policy_gradient import PolicyGradient
from dew.losses.term import Schedule, Term


def trl_gkd(*, beta: float = 0.5) -> tuple[Term, ...]:
    """TRL's `GKDTrainer`: the raw JSD at temperature 1, the two KLs at its ends.

    Quirks kept: the interior falls to 0 towards both ends, where the value then jumps
    to a KL, so beta = 1e-4 is about 1e-4 of beta = 0; and the trainer's `temperature`
    (0.9 by default) is for sampling only, the loss is always at 1.

    >>> [type(term).__name__ for term in trl_gkd(beta=0.0)]
    ['ForwardKL']
    """
    return (_jsd_with_special_ends(beta, weight=1.0, temperature=1.0),)


def liger(
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
) -> tuple[Term, ...]:
    """Liger's fused linear JSD: the raw JSD without T squared, beside cross-entropy.

    Quirk kept: as `trl_gkd`, it jumps at both ends. Left out: where the teacher has
    more rows, Liger pads the *student* with logits of 0, so that identical models have
    a loss (align vocabularies instead); versions before 0.6 summed the soft loss over
    masked positions too and divided by all of them.
    """
    soft = _jsd_with_special_ends(
        beta, weight=weight_soft_loss, temperature=temperature
    )
    return soft, CrossEntropy(weight=weight_hard_loss)


def distillkit(
    *,
    temperature: float = 1.0,
    kl_weight: float = 0.5,
    cross_entropy_weight: float = 0.5,
    top_k: int | None = None,
) -> tuple[Term, ...]:
    """DistillKit's KL with T squared, beside cross-entropy; weights are normalised.

    With `top_k`, its default for sparse teachers ("zero"): the teacher renormalised
    over the k, the student not. Left out: DistillKit masks position i by label i
    although position i predicts label i + 1.
    """
    whole = kl_weight + cross_entropy_weight
    share = kl_weight / whole
    kl: Term = ForwardKL(weight=share, temperature=temperature)
    if top_k is not None:
        kl = TopKTail(k=top_k, weight=share, temperature=temperature, rest="teacher")
    return kl, CrossEntropy(weight=cross_entropy_weight / whole)


def torchtune(
    *, kd_ratio: float = 0.5, symmetric_ratio: float | None = None
) -> tuple[Term, ...]:
    """The KD recipe of torchtune: kd_ratio * KD + (1 - kd_ratio) * cross-entropy.

    Always at temperature 1. Quirk kept: its "forward KL" leaves the teacher's entropy
    in, so it is not 0 for equal models; the gradient is the KL's. With
    `symmetric_ratio` r the KD is r * forward + (1 - r) * reverse, where 1 is forward:
    the opposite end to TRL's beta.
    """
    hard = CrossEntropy(weight=1 - kd_ratio)
    if symmetric_ratio is None:
        return SoftCrossEntropy(weight=kd_ratio), hard
    return (
        SoftCrossEntropy(weight=kd_ratio * symmetric_ratio),
        ReverseKL(weight=kd_ratio * (1 - symmetric_ratio)),
        hard,
    )


def minillm(
    *,
    temperature: float = 1.0,
    discount: float = 0.0,
    length_normalised: bool = True,
    single_step: bool = True,
) -> tuple[Term, ...]:
    """TRL's `MiniLLMTrainer` on fresh samples: policy gradient plus single-step KL.

    The single-step part is the reverse KL at `temperature`, without T squared. Left
    out: TRL's mask compares token ids with -100 and so counts padding; give the real
    mask. Its advantage without `length_normalised` is discounted from the start of the
    completion; here, as in the paper, from the token itself. The original code also
    whitens the advantages, clips the ratio and weighs by a mixed sampler; those belong
    to sampling.
    """
    policy = PolicyGradient(
        temperature=temperature,
        discount=discount,
        length_normalised=length_normalised,
    )
    if not single_step:
        return (policy,)
    return policy, ReverseKL(temperature=temperature, t_squared=False)


def maxtext(*, alpha: Schedule = 0.5, temperature: Schedule = 2.0) -> tuple[Term, ...]:
    """MaxText's distillation: alpha * T squared * KL + (1 - alpha) * cross-entropy.

    Its feature loss is `HiddenCosine` or `HiddenMSE` with a weight of `distill_beta`.
    Left out: versions before 2026 averaged over masked positions as well.
    """
    return (
        ForwardKL(weight=alpha, temperature=temperature),
        CrossEntropy(weight=_one_less(alpha)),
    )


def _jsd_with_special_ends(
    beta: float, *, weight: float, temperature: float
) -> Divergence:
    if beta == 0:
        return ForwardKL(weight=weight, temperature=temperature, t_squared=False)
    if beta == 1:
        return ReverseKL(weight=weight, temperature=temperature, t_squared=False)
    return ScaledJSD(
        beta=beta, raw=True, weight=weight, temperature=temperature, t_squared=False
    )


def _one_less(share: Schedule) -> Schedule:
    if callable(share):
        return lambda step: 1 - share(step)
    return 1 - share
