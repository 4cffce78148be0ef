"""The self-check: it passes what is right, and catches what is wrong by name."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.losses.divergences import CrossEntropy, ForwardKL
from dew.objectives.base import Mean
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.check import check_distillation, check_objective
from dew.objectives.distillation.objective import Distillation
from tests.support.models import TEXT, loaded, tiny_decoder


@cache
def pair() -> tuple[CausalLM, CausalLM]:
    return (
        CausalLM(source=loaded(tiny_decoder(), TEXT), seq_len=6),
        CausalLM(source=loaded(tiny_decoder(embed=12), TEXT), seq_len=6),
    )


def batch() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    mask = np.arange(6)[None] < np.asarray([6, 4, 5])[:, None]
    return {"tokens": draw.integers(0, 11, (3, 6), np.int32), "mask": mask}


def failing(rows: Any) -> set[str]:
    return {row.name for row in rows if not row.passed}


def objective(kind: Any = Distillation, **options: Any) -> Any:
    student, teacher = pair()
    terms = options.pop("terms", (ForwardKL(temperature=2.0), CrossEntropy(weight=0.5)))
    return kind(
        student=student,
        teacher=teacher,
        terms=terms,
        measures=(),
        chunk=None,
        **options,
    )


# `dew check` runs the same rows on a real pair in the default tests.
@pytest.mark.full
def test_a_right_pair_passes_every_check() -> None:
    terms = (ForwardKL(temperature=2.0), CrossEntropy(weight=0.5))
    rows = check_distillation(*pair(), batch(), terms=terms)
    assert failing(rows) == set()
    assert len(rows) == 12
    assert all(row.expected and row.found for row in rows)


@dataclass(frozen=True, kw_only=True)
class Swapped(ForwardKL):
    """KL the wrong way round."""

    def between(self, a: Any, s: Any, step: Any = 0) -> Any:
        return super().between(s, a, step)


@dataclass(frozen=True, kw_only=True)
class SquaredValueOnly(ForwardKL):
    """T squared, here 4, in the number that is logged, not in the gradient."""

    def values(self, *args: Any, **options: Any) -> Any:
        values = super().values(*args, **options)
        smaller = values / 4.0
        return smaller + jax.lax.stop_gradient(values - smaller)


class Unmasked(Distillation):
    """Padding counts as text does."""

    def loss(self, params: Any, batch: Any, step: Any) -> Any:
        open_ = {k: v for k, v in batch.items() if k not in ("mask", "segment_ids")}
        return super().loss(params, open_, step)


class Unshifted(Distillation):
    """Position i counts by the mask of token i, though it predicts token i + 1."""

    def _score_student(self, params: Any, batch: Any, step: Any, *, split: bool) -> Any:
        scored, aux = super()._score_student(params, batch, step, split=split)
        real = batch.get("mask", jnp.ones(scored.weights.shape, bool))
        return replace(scored, weights=real.astype(jnp.float32)), aux


class MeanOfMeans(Distillation):
    """Every microbatch weighs the same, however little is in it."""

    def loss(self, params: Any, batch: Any, step: Any) -> Any:
        stats, aux = super().loss(params, batch, step)
        return Mean(stats.total / jnp.maximum(stats.mass, 1), jnp.ones(())), aux


@pytest.mark.parametrize(
    ("broken", "caught"),
    [
        (
            lambda: objective(terms=(Swapped(),)),
            "formula",
        ),
        (
            lambda: objective(terms=(SquaredValueOnly(temperature=2.0),)),
            "slope",
        ),
        (lambda: objective(Unmasked), "right padding"),
        (
            lambda: objective(Unshifted),
            "mass",
        ),
        (
            lambda: objective(MeanOfMeans),
            "accumulation",
        ),
    ],
    ids=["swapped", "squared value only", "unmasked", "unshifted", "mean of means"],
)
def test_a_broken_loss_is_caught_by_name(broken: Any, caught: str) -> None:
    (row,) = check_objective(broken(), batch(), only=(caught,))
    assert not row.passed, row
    assert row.expected != row.found
