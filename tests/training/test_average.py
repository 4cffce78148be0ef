"""The average against float64 in numpy, whatever the dtype of its leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dew.objectives.base import EMASpec, Step, under
from dew.state import TrainState
from dew.training.ema import initial_average, next_average
from dew.training.optimizers import sgd
from tests.support.objectives import Run, Toy, as_mean, microbatch
from tests.support.tolerances import AVERAGE_1000, RTOL
from tests.support.trees import assert_identical, random_tree

COMMITS = 1000


def state_of(variables: Any, ema: Any, commits: Any = 0) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        attempts=zero,
        accepted=zero,
        commits=jnp.asarray(commits, jnp.int32),
        rejected=zero,
        dropped=zero,
        key=jax.random.key(0),
        variables=variables,
        optimizer=None,
        ema=ema,
        window=None,
    )


def averaged(start: Any, spec: EMASpec, lives: Any) -> Any:
    """The average after a commit to each of the stacked leaves `lives`."""
    toy = Toy(ema=spec)
    initial = initial_average(toy, {"params": {"w": start}}, held=())

    def commit(ema: Any, row: Any) -> Any:
        number, live = row
        variables = {"params": {"w": live}}
        return next_average(toy, state_of(variables, ema, number), variables), None

    assert initial is not None
    rows = (jnp.arange(len(lives), dtype=jnp.int32), lives)
    return jax.lax.scan(commit, initial, rows)[0]["params"]["w"]


def walk(dtype: Any) -> Any:
    """Weights of 0.02 on the way to others, as a fine-tuning moves them."""
    draw = np.random.default_rng(0)
    steps = np.cumsum(draw.normal(size=(COMMITS + 1, 64)) * 1e-4 + 2e-5, axis=0)
    return jnp.asarray(0.02 * draw.normal(size=64) + steps).astype(dtype)


@pytest.mark.parametrize("decay", [0.9, 0.999, 0.9999])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_thousand_commits_are_those_of_float64(dtype: str, decay: float) -> None:
    path = walk(dtype)
    spec = EMASpec(optax.constant_schedule(decay))
    got = averaged(path[0], spec, path[1:])
    want = np.asarray(path[0], np.float64)
    for live in np.asarray(path[1:], np.float64):
        want = decay * want + (1 - decay) * live
    assert got.dtype == jnp.float32
    moved = np.abs(want - np.asarray(path[0], np.float64)).max()
    error = np.abs(np.asarray(got, np.float64) - want).max() / moved
    assert error < AVERAGE_1000, error


def test_in_float64_the_average_is_float64() -> None:
    with jax.enable_x64(True):
        path = walk(jnp.float64)
        got = averaged(path[0], EMASpec(optax.constant_schedule(0.999)), path[1:])
        assert got.dtype == jnp.float64
        want = np.asarray(path[0])
        for live in np.asarray(path[1:]):
            want = 0.999 * want + (1 - 0.999) * live
        np.testing.assert_allclose(got, want, rtol=RTOL["float64"])


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_the_ends_of_a_decay_are_exact(decay: float) -> None:
    path = walk("float32")[:2]
    got = averaged(path[0], EMASpec(optax.constant_schedule(decay)), path[1:])
    np.testing.assert_array_equal(got, path[0] if decay else path[1])


def test_equal_weights_stay_the_average_to_the_bit() -> None:
    start = walk("float32")[0]
    spec = EMASpec(lambda n: jnp.where(jnp.asarray(n) < 50, 0.3, 0.95))
    got = averaged(start, spec, jnp.broadcast_to(start, (100, *start.shape)))
    np.testing.assert_array_equal(got, start)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_average_is_stored_in_the_dtype_of_its_own(dtype: str) -> None:
    path = walk("bfloat16")
    spec = EMASpec(optax.constant_schedule(0.9), dtype=jnp.dtype(dtype))
    assert averaged(path[0], spec, path[1:2]).dtype == dtype


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_a_dtype_without_fractions_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"EMASpec.dtype .* floating .* got {dtype}"):
        EMASpec(optax.constant_schedule(0.9), dtype=jnp.dtype(dtype))


def test_counts_and_keys_are_those_of_the_last_commit() -> None:
    toy = Toy(ema=EMASpec(optax.constant_schedule(0.999)))
    for seed in range(8):
        tree = random_tree(seed)
        ema = initial_average(toy, tree, held=())
        moved = next_average(toy, state_of(tree, ema), tree)
        assert_identical(moved, ema)
        assert_identical(state_of(tree, moved).averaged, tree)


def test_a_run_in_bfloat16_averages_in_float32_and_serves_bfloat16() -> None:
    def loss(params: Any, batch: Any, step: Step) -> Any:
        assert step.ema is not None
        assert step.ema["params"]["w"].dtype == jnp.bfloat16
        wide = {"params": {"w": params["params"]["w"].astype(jnp.float32)}}
        return as_mean(wide, batch, step)

    start = {"params": {"w": jnp.asarray([0.5, -1.0, 2.0], jnp.bfloat16)}}
    spec = EMASpec(optax.constant_schedule(0.999), under("params"))
    optimizer = sgd(0.1).transform
    run = Run(Toy(of=loss, start=start, ema=spec), optimizer=optimizer)
    run.feed(*[microbatch(1)] * 100)
    average, live = run.state.ema["params"]["w"], run.state.variables["params"]["w"]
    assert (average.dtype, live.dtype) == (jnp.float32, jnp.bfloat16)
    assert np.all(np.asarray(average) != np.asarray(start["params"]["w"], np.float32))
    assert run.state.averaged is not None
    assert run.state.averaged["params"]["w"].dtype == jnp.bfloat16
