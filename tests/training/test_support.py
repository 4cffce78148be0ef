"""Statistics without mass add nothing; loss and gradient are of the same sums."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from dew.objectives.base import Aux, Mean, Step, mean_loss
from dew.training.trainer import Trainer
from tests.support.objectives import (
    MOMENTUM,
    Composite,
    Moments,
    Run,
    Toy,
    as_mean,
    as_moments,
    as_scalar,
    errors,
    joined,
    microbatch,
    variance,
)
from tests.support.tolerances import ACCUMULATION
from tests.support.trees import assert_identical

STRAYS = {"nonzero": 7.0, "nan": np.nan, "infinite": np.inf}
PARTS = [microbatch(seed, (1, 0, 2, 1)) for seed in range(3)]


def batch_of(seed: int, masses: Any, stray: float = 0.0) -> dict[str, Any]:
    return {**microbatch(seed, masses), "stray": jnp.full(4, stray, jnp.float32)}


def careless(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
    """A mean whose total also counts what no mass stands for, weights included."""
    stats, _ = as_mean(params, batch, step)
    stray = batch["stray"][0] * jnp.sum(params["params"]["w"] ** 2)
    stats = Mean(stats.total + stray, stats.mass)
    return stats, Aux(metrics={"error": stats})


@struct.dataclass
class Twice:
    """Two means, of which the value is the sum."""

    whole: Mean
    part: Mean


class Summed(Toy):
    def reduce_loss(self, stats: Twice) -> tuple[Any, Any]:
        (first, a), (second, b) = mean_loss(stats.whole), mean_loss(stats.part)
        return first + second, a | b


def as_twice(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
    stats, aux = careless(params, batch, step)
    return Twice(stats, Mean.of(errors(params, batch), batch["weight"])), aux


def careless_moments(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
    stats, aux = as_moments(params, batch, step)
    stray = batch["stray"][0] * jnp.sum(params["params"]["w"] ** 2)
    return Moments(stats.count, stats.first + stray, stats.second), aux


EMPTY = (0, 0, 0, 0)
KINDS: dict[str, Toy] = {
    "mean": Toy(of=careless),
    "means": Summed(of=as_twice),
    "composite": Composite(of=careless_moments),
}


@pytest.mark.parametrize("stray", STRAYS.values(), ids=STRAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_mass_alone_has_neither_loss_nor_gradient(
    kind: str, stray: float
) -> None:
    first = batch_of(0, (1, 1, 1, 1))
    run = Run(KINDS[kind], optimizer=MOMENTUM, example=first)
    run.feed(first)
    before = run.state
    report = run.feed(batch_of(1, EMPTY, stray))
    assert (float(report.loss), float(report.grad_norm)) == (0, 0)
    assert (bool(report.accepted), bool(report.committed)) == (True, False)
    assert_identical(run.state.variables, before.variables)
    assert_identical(run.state.optimizer, before.optimizer)
    assert int(run.state.rejected) == 0


@pytest.mark.parametrize("stray", STRAYS.values(), ids=STRAYS)
@pytest.mark.parametrize("kind", ["mean", "means"])
def test_in_a_window_it_adds_nothing(kind: str, stray: float) -> None:
    outcomes = []
    for total in (0.0, stray):
        middle = batch_of(1, EMPTY, total)
        parts = [batch_of(0, (1, 0, 2, 1)), middle, batch_of(2, (5, 1, 0, 1))]
        run = Run(KINDS[kind], accumulation=3, example=middle)
        reports = [run.feed(part) for part in parts]
        assert [bool(r.stray) for r in reports] == [False, bool(total != 0), False]
        outcomes.append((run.state.variables, reports[-1].loss, reports[-1].metrics))
    assert_identical(outcomes[1], outcomes[0])


def test_statistics_without_support_that_are_not_finite_add_nothing() -> None:
    outcomes = []
    for total in (0.0, np.nan):
        middle = batch_of(1, EMPTY, total)
        parts = [batch_of(0, (1, 0, 2, 1)), middle, batch_of(2, (5, 1, 0, 1))]
        run = Run(KINDS["composite"], accumulation=3, example=middle)
        reports = [run.feed(part) for part in parts]
        assert [bool(r.stray) for r in reports] == [False, bool(total != 0), False]
        outcomes.append((run.state.variables, reports[-1].loss))
    assert_identical(outcomes[1], outcomes[0])


def test_statistics_that_lack_support_alone_may_have_it_together() -> None:
    class Patient(Composite):
        """A variance that takes more records than one microbatch has."""

        def reduce_loss(self, stats: Moments) -> tuple[Any, Any]:
            value, _ = variance(stats)
            return value, stats.count > 5

    whole = Run(Patient(of=as_moments), example=joined(PARTS))
    pooled = Run(Patient(of=as_moments), accumulation=3)
    once, reports = whole.feed(joined(PARTS)), [pooled.feed(part) for part in PARTS]
    assert not any(bool(report.stray) for report in reports)
    assert bool(reports[-1].committed)
    close(reports[-1].loss, once.loss)
    close(*(run.state.variables["params"]["w"] for run in (pooled, whole)))


# Loss and gradient of the same sums

NAN = {**PARTS[0], "y": jnp.full(4, jnp.nan)}


def mean_of(parts: list[Any]) -> Callable[[Any], Any]:
    def value(params: Any) -> Any:
        stats = [as_mean({"params": params}, b, step_of())[0] for b in parts]
        return sum(s.total for s in stats) / sum(s.mass for s in stats)

    return value


def scalar_of(parts: list[Any]) -> Callable[[Any], Any]:
    def value(params: Any) -> Any:
        terms = [as_scalar({"params": params}, b, step_of())[0] for b in parts]
        return sum(terms) / len(terms)

    return value


def variance_of(parts: list[Any]) -> Callable[[Any], Any]:
    def value(params: Any) -> Any:
        stats = [as_moments({"params": params}, b, step_of())[0] for b in parts]
        return variance(jax.tree.map(lambda *leaves: sum(leaves), *stats))[0]

    return value


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=ACCUMULATION, atol=ACCUMULATION)


def step_of() -> Step:
    return Step(jnp.int32(0), jax.random.key(0))


@pytest.mark.parametrize(
    ("objective", "value_of"),
    [
        (Toy(of=as_mean), mean_of),
        (Toy(of=as_scalar), scalar_of),
        (Composite(of=as_moments), variance_of),
    ],
    ids=["mean", "scalar", "composite"],
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_loss_of_a_commit_is_that_of_its_gradient(
    objective: Toy, value_of: Any, accumulation: int
) -> None:
    run = Run(objective, accumulation=accumulation)
    for parts in (PARTS[:accumulation], PARTS[-accumulation:]):
        start = run.state.variables["params"]
        # Rejected microbatches before and within the window have no part in it.
        report = run.feed(NAN, parts[0], *[b for p in parts[1:] for b in (NAN, p)])
        value = value_of(parts)
        gradient = jax.grad(value)(start)["w"]
        assert report.committed
        close(report.loss, value(start))
        close(report.grad_norm, jnp.linalg.norm(gradient))
        close(run.state.variables["params"]["w"], start["w"] - 0.1 * gradient)


@pytest.mark.parametrize("kind", [Toy(of=as_mean), Composite(of=as_moments)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_is_rejected_is_in_no_reported_sum(kind: Toy, accumulation: int) -> None:
    run = Run(kind, accumulation=accumulation, max_rejections=2)
    nothing = run.feed(NAN)
    assert (float(nothing.loss), float(nothing.grad_norm)) == (0, 0)
    one = run.feed(PARTS[0])
    again = run.feed(NAN)
    assert float(again.loss) == (0 if accumulation == 1 else float(one.loss))
    assert float(again.grad_norm) == 0
    run.feed(NAN)
    # Halted: nothing more is added, and so nothing more is told.
    halted = run.feed(PARTS[1])
    assert not halted.accepted
    assert float(halted.loss) == float(again.loss)


def test_a_run_says_once_that_a_total_had_no_mass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    masses = [(1, 1, 1, 1), EMPTY]
    data = [batch_of(i, masses[i % 2], float(i % 2)) for i in range(8)]
    trainer = Trainer(Toy(of=careless), MOMENTUM, key=jax.random.key(0))
    state = trainer.fit(iter(data), steps=4, log_every=1)
    assert int(state.commits) == 4
    told = capsys.readouterr().err
    assert told.count("Toy.loss gave a batch after commit 1 statistics") == 1
    assert told.count("without mass") == 1
