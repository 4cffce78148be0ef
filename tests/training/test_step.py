"""Three clocks, accumulation, commits and rejections, against one large batch."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dew.objectives.base import Aux, EMASpec, Mean, Step, freeze, under
from tests.support.objectives import (
    MOMENTUM,
    Composite,
    Counting,
    Run,
    Toy,
    as_mean,
    as_moments,
    as_scalar,
    joined,
    microbatch,
)
from tests.support.tolerances import ACCUMULATION, assert_trees_close

# Unequal masses, and one microbatch of three in which every record is masked.
MASSES = (1, 0, 2, 1), (0, 0, 0, 0), (5, 1, 0, 1)
UNEQUAL = [microbatch(seed, masses) for seed, masses in enumerate(MASSES)]
EMPTY = microbatch(4, (0,) * 4)
NAN = {**microbatch(5), "y": jnp.full(4, jnp.nan)}
KINDS = {"mean": Toy(of=as_mean), "composite": Composite(of=as_moments)}


def weights(run: Run) -> np.ndarray:
    return np.asarray(run.state.variables["params"]["w"])


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=ACCUMULATION, atol=ACCUMULATION)


@pytest.mark.parametrize("objective", KINDS.values(), ids=KINDS)
def test_a_window_is_one_large_batch(objective: Toy) -> None:
    parts = Run(objective, accumulation=3)
    whole = Run(objective, example=joined(UNEQUAL))
    pooled, once = parts.feed(*UNEQUAL * 3), whole.feed(*[joined(UNEQUAL)] * 3)
    close(pooled.loss, once.loss)
    close(pooled.grad_norm, once.grad_norm)
    close(weights(parts), weights(whole))
    assert (int(parts.state.commits), int(parts.state.accepted)) == (3, 9)


def test_scalars_are_terms_of_unit_mass() -> None:
    equal = [microbatch(i) for i in range(3)]
    parts, whole = Run(Toy(of=as_scalar), accumulation=3), Run(Toy(of=as_scalar))
    close(parts.feed(*equal).loss, whole.feed(joined(equal)).loss)
    close(weights(parts), weights(whole))


def test_a_mean_in_half_precision_is_summed_in_float32() -> None:
    def half(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
        stats, aux = as_mean(params, batch, step)
        return Mean(stats.total.astype(jnp.bfloat16), jnp.bfloat16(256)), aux

    run = Run(Toy(of=half), accumulation=3)
    run.feed(microbatch(1), microbatch(2))
    assert run.state.window is not None
    stats = run.state.window.stats
    assert (stats.mass, stats.mass.dtype, stats.total.dtype) == (512, *["float32"] * 2)


def with_noise(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
    """Moments under a dropout of the inputs, so that keys and clocks matter."""
    kept = jax.random.bernoulli(step.key, 0.5, batch["x"].shape)
    scale = 1 + step.step.astype(jnp.float32)
    return as_moments(
        params, {**batch, "x": batch["x"] * scale * kept.astype(jnp.float32)}, step
    )


def test_a_replay_draws_the_randomness_of_the_first_evaluation() -> None:
    run = Run(Composite(of=with_noise), accumulation=3)
    start, root = run.state.variables["params"], run.state.key
    run.feed(*UNEQUAL)

    def value(params: Any) -> Any:
        steps = [Step(jnp.int32(i), jax.random.fold_in(root, i)) for i in range(3)]
        tree = {"params": params}
        parts = [with_noise(tree, b, s)[0] for b, s in zip(UNEQUAL, steps, strict=True)]
        pooled = jax.tree.map(lambda *leaves: sum(leaves), *parts)
        return run.objective.reduce_loss(pooled)[0]

    want = start["w"] - 0.1 * jax.grad(value)(start)["w"]
    close(weights(run), want)


# The commit rule and rejection


@pytest.mark.parametrize("objective", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_window_without_support_updates_nothing(
    objective: Toy, accumulation: int
) -> None:
    run = Run(objective, accumulation=accumulation, optimizer=MOMENTUM)
    before = run.state
    report = run.feed(*[EMPTY] * 6 * accumulation)
    assert (bool(report.full), bool(report.committed)) == (True, False)
    assert (bool(report.accepted), int(report.rejected)) == (True, 0)
    assert int(run.state.accepted) == 6 * accumulation
    clocks = {"attempts": before.attempts, "accepted": before.accepted}
    assert_same(replace(run.state, window=None, **clocks), replace(before, window=None))
    # Nor does it count towards a halt: the next full window commits.
    assert run.feed(*UNEQUAL[:1] * accumulation).committed


def test_nothing_moves_before_a_window_is_full() -> None:
    run = Run(Toy(), accumulation=3, optimizer=MOMENTUM)
    before = run.state
    report = run.feed(*UNEQUAL[:2])
    assert not report.full
    assert_same(run.state.variables, before.variables)
    assert_same(run.state.optimizer, before.optimizer)
    assert int(run.state.commits) == 0
    assert run.feed(UNEQUAL[2]).committed


@pytest.mark.parametrize("objective", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_rejected_microbatch_leaves_all_but_the_attempts(
    objective: Toy, accumulation: int
) -> None:
    run = Run(objective, accumulation=accumulation, optimizer=MOMENTUM)
    run.feed(*UNEQUAL)
    before = run.state
    report = run.feed(NAN)
    assert (bool(report.accepted), int(report.rejected)) == (False, 1)
    assert not bool(jnp.all(jnp.asarray(jax.tree.leaves(report.finite["statistics"]))))
    assert int(run.state.attempts) == 4
    counts = {"attempts": before.attempts, "rejected": before.rejected}
    assert_same(replace(run.state, **counts), before)
    # An accepted microbatch ends the row.
    run.feed(UNEQUAL[0])
    assert int(run.state.rejected) == 0


def test_a_gradient_that_is_not_finite_is_a_rejection() -> None:
    def steep(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
        # The root has value 0 and slope infinity where nothing is left of w.
        return jnp.sqrt(jnp.sum(0 * params["params"]["w"])), Aux()

    run = Run(Toy(of=steep))
    report = run.feed(microbatch(1))
    assert (bool(report.accepted), int(report.rejected)) == (False, 1)
    assert bool(report.finite["statistics"].total)
    assert not bool(jnp.all(report.finite["gradient"]))


def test_after_enough_rejections_in_a_row_nothing_moves_any_more() -> None:
    run = Run(Toy(), max_rejections=3)
    run.feed(NAN, NAN, microbatch(1), NAN, NAN, NAN)
    before = weights(run)
    report = run.feed(microbatch(1))
    assert (bool(report.accepted), int(report.rejected)) == (False, 3)
    np.testing.assert_array_equal(weights(run), before)
    assert (int(run.state.accepted), int(run.state.attempts)) == (1, 7)


def test_windows_whose_pooled_gradient_is_not_finite_are_counted() -> None:
    run = Run(Composite(of=with_steep_gradient), accumulation=2, max_rejections=2)
    before = weights(run)
    report = run.feed(*[microbatch(1)] * 2)
    assert (bool(report.accepted), bool(report.committed)) == (True, False)
    assert (int(report.dropped), int(report.rejected)) == (1, 0)
    report = run.feed(*[microbatch(1)] * 4)
    assert (int(report.dropped), bool(report.accepted)) == (2, False)
    np.testing.assert_array_equal(weights(run), before)


def with_steep_gradient(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
    stats, aux = as_moments(params, batch, step)
    steep = jnp.sqrt(jnp.sum(0 * params["params"]["w"]))
    return replace(stats, second=stats.second + steep), aux


def test_fewer_than_one_microbatch_or_rejection_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be >= 1, got 0 and 5"):
        Run(Toy(), accumulation=0)


# The three clocks


def test_attempts_drive_keys_and_accepted_microbatches_schedules() -> None:
    def clocks(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
        drawn = jax.random.uniform(step.key)
        stats, _ = as_mean(params, batch, step)
        return stats, Aux(metrics={"step": step.step, "drawn": drawn})

    run = Run(Toy(of=clocks))
    root = run.state.key
    seen = [run.feed(b) for b in (microbatch(1), NAN, microbatch(2), EMPTY)]
    drawn = [jax.random.uniform(jax.random.fold_in(root, i)) for i in range(4)]
    np.testing.assert_array_equal([r.metrics["drawn"] for r in seen], drawn)
    assert [int(r.metrics["step"]) for r in seen] == [0, 1, 1, 2]


def test_commits_drive_the_optimizer_and_its_schedule() -> None:
    rates = jnp.asarray([0.5, 0.25, 0.125, 0.0])
    run = Run(Toy(), accumulation=2, optimizer=optax.sgd(lambda n: rates[n]))
    batch = microbatch(1)
    for rate in rates[:3]:
        start = run.state.variables["params"]
        run.feed(NAN, batch, batch)
        gradient = jax.grad(lambda p: mean_value(p, batch))(start)["w"]
        want = start["w"] - rate * gradient
        close(weights(run), want)
    run.feed(EMPTY, EMPTY)
    counts = (run.state.attempts, run.state.accepted, run.state.commits)
    assert tuple(map(int, counts)) == (11, 8, 3)


def mean_value(params: Any, batch: Any) -> Any:
    stats, _ = as_mean({"params": params}, batch, Step(jnp.int32(0), jax.random.key(0)))
    return stats.total / stats.mass


def test_the_average_follows_over_commits_by_their_schedule() -> None:
    decays = jnp.asarray([0.5, 0.75, 0.875])
    ema = EMASpec(lambda n: decays[n], under("params"))
    run = Run(Toy(ema=ema), accumulation=2)
    average = weights(run)
    for decay in decays:
        run.feed(*UNEQUAL[:2])
        average = decay * average + (1 - decay) * weights(run)
        run.feed(NAN, EMPTY, EMPTY)
    assert run.state.averaged is not None
    got = run.state.averaged["params"]["w"]
    close(got, average)


def test_the_objective_sees_its_average_and_nothing_without_one() -> None:
    def distance(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
        stats, _ = as_mean(params, batch, step)
        assert step.ema is not None
        gap = jnp.sum(jnp.abs(params["params"]["w"] - step.ema["params"]["w"]))
        return stats, Aux(metrics={"gap": gap})

    spec = EMASpec(lambda n: 1.0, under("params"))
    run = Run(Toy(of=distance, ema=spec))
    start = weights(run)
    assert run.feed(microbatch(1)).metrics["gap"] == 0
    gap = run.feed(microbatch(2)).metrics["gap"]
    moved = run.state.averaged
    assert gap > 0
    assert moved is not None
    np.testing.assert_array_equal(moved["params"]["w"], start)
    assert Run(Toy()).state.averaged is None


def test_frozen_leaves_stay_and_have_no_optimizer_state() -> None:
    tree = {"params": {"w": jnp.ones(3), "held": jnp.ones((7, 11))}}
    spec = EMASpec(lambda n: 0.5)
    start = freeze(tree, under("params", "w"))
    run = Run(Toy(start=start, ema=spec), optimizer=MOMENTUM)
    run.feed(*UNEQUAL)
    shapes = {leaf.shape for leaf in jax.tree.leaves(run.state.optimizer)}
    assert shapes == {(3,)}
    held = run.state.variables["frozen"]["held"]
    np.testing.assert_array_equal(held, np.ones((7, 11)))
    assert set(run.state.ema) == {"params"}
    assert np.any(weights(run) != 1)


# Reports beside the statistics


def start_with(**collections: Any) -> dict[str, Any]:
    return {"params": {"w": jnp.asarray([0.5, -1.0, 2.0])}, **collections}


def replacing(variables: Any) -> Toy:
    def loss(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
        return as_mean(params, batch, step)[0], Aux(variables=variables)

    stats = {"mean": jnp.zeros(2), "var": jnp.ones(2)}
    frozen = {"held": jnp.ones(1)}
    return Toy(of=loss, start=start_with(batch_stats={"norm": stats}, frozen=frozen))


NORM = {"mean": jnp.ones(2), "var": jnp.ones(2)}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"params": {"w": jnp.ones(3)}}, "params is not a loss's to replace"),
        ({"frozen": {"held": jnp.ones(1)}}, "frozen is not a loss's to replace"),
        ({"moe": {}}, r"moe is not a collection of this run: \['batch_stats'"),
        (
            {"batch_stats": {"norm": {"mean": jnp.ones(2)}}},
            "norm/var was f",
        ),
        (
            {"batch_stats": {"norm": {**NORM, "new": jnp.ones(1)}}},
            "batch_stats/norm/new was absent",
        ),
        (
            {"batch_stats": {"norm": {**NORM, "var": jnp.ones(3)}}},
            r"norm/var was float32\[2\] and would be float32\[3\]",
        ),
        (
            {"batch_stats": {"norm": {**NORM, "var": jnp.ones(2, jnp.int32)}}},
            r"norm/var was float32\[2\] and would be int32\[2\]",
        ),
    ],
)
def test_a_wrong_replacement_is_named_by_its_path(variables: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"Toy replaces variables .*{message}"):
        Run(replacing(variables)).feed(microbatch(1))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_collections_are_replaced_by_every_accepted_microbatch(
    accumulation: int,
) -> None:
    def loss(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
        stats, _ = as_mean(params, batch, step)
        return stats, Aux(variables={"count": {"n": params["count"]["n"] + 1}})

    toy = Toy(of=loss, start=start_with(count={"n": jnp.int32(0)}))
    run = Run(toy, accumulation=accumulation)
    run.feed(microbatch(1), NAN, EMPTY, microbatch(2))
    assert run.state.variables["count"]["n"] == 3


@pytest.mark.parametrize("accumulation", [1, 3])
def test_effects_are_summed_and_applied_once_a_commit(accumulation: int) -> None:
    def loss(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
        stats, _ = as_mean(params, batch, step)
        calls = jnp.where(stats.mass >= 0, 1, 0)
        return stats, Aux(effects={"mass": stats.mass, "applied": calls})

    seen = {"mass": jnp.float32(0), "applied": jnp.int32(0)}
    toy = Counting(of=loss, start=start_with(seen=seen))
    run = Run(toy, accumulation=accumulation)
    run.feed(*UNEQUAL[:2], NAN)
    in_window = (4.0, 1) if accumulation == 1 else (0.0, 0)
    assert tuple(run.state.variables["seen"].values()) == in_window[::-1]
    run.feed(UNEQUAL[2])
    mass, calls = (run.state.variables["seen"][k] for k in ("mass", "applied"))
    assert (mass, calls) == ((11.0, 2) if accumulation == 1 else (11.0, 3))


def test_the_optimizer_gets_attention_maxima_once_a_commit() -> None:
    def loss(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
        heads = jnp.stack([-batch["weight"], batch["weight"]], axis=1)
        stats, _ = as_mean(params, batch, step)
        return stats, Aux(qk_stats={"attn": {"max_logits": (heads,)}})

    def record(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        (rows,) = extra["qk_stats"]["attn"]["max_logits"]
        return updates, (state[0] + 1, jnp.max(rows, axis=0))

    start = jnp.int32(0), jnp.zeros(2)
    keeper = optax.GradientTransformationExtraArgs(lambda params: start, record)
    run = Run(Toy(of=loss), accumulation=2, optimizer=keeper)
    run.feed(microbatch(1, (2, 1, 3, 4)), microbatch(2, (9, 2, 5, 3)))
    count, maxima = run.state.optimizer
    assert (int(count), list(map(float, maxima))) == (1, [-1.0, 9.0])


def test_an_optimizer_that_knows_nothing_of_maxima_serves_as_well() -> None:
    run = Run(Toy(), optimizer=optax.trace(-0.1))
    assert run.feed(microbatch(1)).committed


def test_metrics_are_pooled_over_a_window() -> None:
    def loss(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
        stats, _ = as_mean(params, batch, step)
        rows = Mean.of(batch["y"], batch["weight"])
        return stats, Aux(metrics={"rows": rows, "mass": stats.mass})

    report = Run(Toy(of=loss), accumulation=3).feed(*UNEQUAL)
    whole = joined(UNEQUAL)
    want = np.average(np.float64(whole["y"]), weights=np.float64(whole["weight"]))
    close(report.metrics["rows"], want)
    close(report.metrics["mass"], 11 / 3)


def assert_same(got: Any, want: Any) -> None:
    """Bit for bit the same, keys and all."""

    def plain(leaf: Any) -> Any:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    got, want = (jax.tree.map(plain, tree) for tree in (got, want))
    assert_trees_close(got, want, rtol=0)
