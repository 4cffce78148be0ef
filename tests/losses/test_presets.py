"""Presets against the projects' formulas, written in torch from what they compute."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dew.losses import presets
from dew.losses.chunking import MaterialisedScores, term_sums
from dew.losses.divergences import TopKTail
from dew.losses.policy_gradient import PolicyGradient
from dew.losses.scores import DenseScores
from dew.losses.term import TermInputs
from tests.losses import reference as ref
from tests.support.tolerances import NEAR_END, RTOL

LABELS = np.array([[3, 11, 0, 42], [7, 7, 49, 20]])
MASK = np.array([[True, True, False, True], [True, True, True, False]])


def ours(terms: Any, mask: np.ndarray = MASK) -> tuple[float, np.ndarray]:
    """The weighted sum of the terms over the mass, and its gradient."""
    z, y = (jnp.asarray(x, jnp.float32) for x in ref.pair(seq=4))
    weights = jnp.asarray(mask, jnp.float32)

    def mean(y: Any) -> Any:
        sides = MaterialisedScores(DenseScores(y)), MaterialisedScores(DenseScores(z))
        sums = term_sums(terms, *sides, weights=weights, labels=jnp.asarray(LABELS))
        pairs = zip(terms, sums, strict=True)
        return sum(term.weight * one for term, one in pairs) / weights.sum()

    value, slope = jax.value_and_grad(mean)(y)
    return float(value), np.asarray(slope)


def theirs(formula: Callable[..., torch.Tensor]) -> tuple[float, np.ndarray]:
    z, y = (torch.tensor(x, dtype=torch.float64) for x in ref.pair(seq=4))
    y.requires_grad_()
    value = formula(y, z, torch.tensor(LABELS), torch.tensor(MASK))
    (slope,) = torch.autograd.grad(value, y)
    return float(value.detach()), slope.numpy()


def mean_over(mask: torch.Tensor, per_token: torch.Tensor) -> torch.Tensor:
    return (per_token * mask).sum() / mask.sum()


def hard(y: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y[mask], labels[mask])


def kl_div(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """KL(p / q) of log-probabilities: torch takes the second argument as the target."""
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def generalised_jsd(beta: float, temperature: float) -> Callable[..., torch.Tensor]:
    def formula(y: Any, z: Any, labels: Any, mask: Any) -> torch.Tensor:
        s, a = F.log_softmax(y / temperature, -1), F.log_softmax(z / temperature, -1)
        if beta == 0:
            return mean_over(mask, kl_div(s, a))
        if beta == 1:
            return mean_over(mask, kl_div(a, s))
        m = torch.log(beta * a.exp() + (1 - beta) * s.exp())
        return mean_over(mask, beta * kl_div(m, a) + (1 - beta) * kl_div(m, s))

    return formula


def liger(beta: float, temperature: float, w: float) -> Callable[..., torch.Tensor]:
    soft = generalised_jsd(beta, temperature)
    return lambda y, z, labels, mask: (
        w * hard(y, labels, mask) + (1 - w) * soft(y, z, labels, mask)
    )


def tempered_kl(share: float, t: float) -> Callable[..., torch.Tensor]:
    def formula(y: Any, z: Any, labels: Any, mask: Any) -> torch.Tensor:
        kl = kl_div(F.log_softmax(y / t, -1), F.log_softmax(z / t, -1))
        return share * t**2 * mean_over(mask, kl) + (1 - share) * hard(y, labels, mask)

    return formula


def renormalised_top_k(k: int, share: float, t: float) -> Callable[..., torch.Tensor]:
    def formula(y: Any, z: Any, labels: Any, mask: Any) -> torch.Tensor:
        kept, ids = F.log_softmax(z / t, -1).topk(k)
        a = kept - kept.logsumexp(-1, keepdim=True)
        s = F.log_softmax(y / t, -1).gather(-1, ids)
        kl = (a.exp() * (a - s)).sum(-1)
        return share * t**2 * mean_over(mask, kl) + (1 - share) * hard(y, labels, mask)

    return formula


def torchtune(ratio: float, symmetric: float) -> Callable[..., torch.Tensor]:
    def formula(y: Any, z: Any, labels: Any, mask: Any) -> torch.Tensor:
        p, q = F.softmax(z, -1), F.softmax(y, -1)
        forward = -(p * F.log_softmax(y, -1)).sum(-1)
        reverse = -(q * F.log_softmax(z, -1) - q * F.log_softmax(y, -1)).sum(-1)
        kd = mean_over(mask, symmetric * forward + (1 - symmetric) * reverse)
        return (1 - ratio) * hard(y, labels, mask) + ratio * kd

    return formula


@pytest.mark.parametrize(
    ("terms", "formula"),
    [
        (presets.trl_gkd(), generalised_jsd(0.5, 1.0)),
        (presets.trl_gkd(beta=0.1), generalised_jsd(0.1, 1.0)),
        (presets.trl_gkd(beta=0.0), generalised_jsd(0.0, 1.0)),
        (presets.trl_gkd(beta=1.0), generalised_jsd(1.0, 1.0)),
        (presets.liger(), liger(0.5, 1.0, 0.5)),
        (
            presets.liger(
                beta=0.2, temperature=2.0, weight_hard_loss=0.3, weight_soft_loss=0.7
            ),
            liger(0.2, 2.0, 0.3),
        ),
        (presets.distillkit(temperature=2.0), tempered_kl(0.5, 2.0)),
        (
            presets.distillkit(
                temperature=2.0, kl_weight=3.0, cross_entropy_weight=1.0
            ),
            tempered_kl(0.75, 2.0),
        ),
        (
            presets.distillkit(temperature=2.0, top_k=12),
            renormalised_top_k(12, 0.5, 2.0),
        ),
        (presets.torchtune(), torchtune(0.5, 1.0)),
        (presets.torchtune(kd_ratio=0.8, symmetric_ratio=0.3), torchtune(0.8, 0.3)),
        (presets.maxtext(), tempered_kl(0.5, 2.0)),
        (presets.maxtext(alpha=0.9, temperature=4.0), tempered_kl(0.9, 4.0)),
    ],
)
def test_a_preset_reproduces_the_projects_value_and_gradient(
    terms: Any, formula: Callable[..., torch.Tensor]
) -> None:
    (value, slope), (want, want_slope) = ours(terms), theirs(formula)
    np.testing.assert_allclose(value, want, rtol=RTOL["preset"])
    np.testing.assert_allclose(slope, want_slope, atol=RTOL["preset"])


def minillm(t: float, gamma: float) -> Callable[..., torch.Tensor]:
    def formula(y: Any, z: Any, labels: Any, mask: Any) -> torch.Tensor:
        s, a = F.log_softmax(y / t, -1), F.log_softmax(z / t, -1)
        pick = lambda x: x.gather(-1, labels[..., None])[..., 0]
        reward = (pick(a) - pick(s)).detach()
        powers = gamma ** torch.arange(labels.shape[1], dtype=reward.dtype)
        back = lambda x: x.flip(1).cumsum(1).flip(1)
        advantage = back(reward * powers) / back(torch.ones_like(reward) * powers)
        if gamma == 0:
            advantage = reward
        ratio = torch.exp(pick(s) - pick(s).detach())
        return (-advantage * ratio).mean() + kl_div(a, s).mean()

    return formula


@pytest.mark.parametrize(("temperature", "discount"), [(1.0, 0.0), (2.0, 0.9)])
def test_minillm_reproduces_the_policy_gradient_and_the_single_step_kl(
    temperature: float, discount: float
) -> None:
    terms = presets.minillm(temperature=temperature, discount=discount)
    everywhere = np.ones_like(MASK)
    value, slope = ours(terms, everywhere)
    want, want_slope = theirs(minillm(temperature, discount))
    np.testing.assert_allclose(value, want, rtol=RTOL["preset"])
    np.testing.assert_allclose(slope, want_slope, atol=RTOL["preset"])


def test_an_advantage_looks_only_at_later_tokens_of_the_mask() -> None:
    z, y = (jnp.asarray(x, jnp.float32) for x in ref.pair(seq=4))
    term = PolicyGradient(discount=0.5, length_normalised=False)
    inputs = TermInputs(y, DenseScores(z), mask=jnp.asarray(MASK))
    call = lambda labels: term.values(replace(inputs, labels=jnp.asarray(labels)))
    other = LABELS.copy()
    other[:, 0] = 1
    masked = np.where(MASK, LABELS, 33)
    got = call(LABELS)
    np.testing.assert_array_equal(got[:, 1:], call(other)[:, 1:])
    np.testing.assert_array_equal(got, call(masked))
    assert not np.asarray(got)[~MASK].any()


def test_the_interior_of_the_raw_jsd_does_not_reach_its_ends() -> None:
    near, _ = ours(presets.trl_gkd(beta=1e-4))
    end, _ = ours(presets.trl_gkd(beta=0.0))
    assert near < NEAR_END * end


def test_maxtext_follows_schedules_that_still_sum_to_one() -> None:
    soft, hard = presets.maxtext(alpha=lambda step: step / 10)
    assert callable(soft.weight)
    assert callable(hard.weight)
    assert soft.weight(jnp.asarray(3.0)) + hard.weight(jnp.asarray(3.0)) == 1


def test_a_sparse_distillkit_preset_is_the_renormalised_top_k() -> None:
    assert isinstance(presets.distillkit(top_k=5)[0], TopKTail)
