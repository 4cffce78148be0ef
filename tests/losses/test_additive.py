"""Sums of losses add up: over microbatches, padding, the order of rows, and devices."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dew.losses.chunking import MaterialisedScores, term_sums
from dew.losses.divergences import CrossEntropy, ForwardKL, ScaledJSD
from dew.losses.scores import DenseScores
from tests.losses import reference as ref
from tests.support.tolerances import ATOL, RTOL

TERMS = (ForwardKL(temperature=2.0), ScaledJSD(beta=0.2), CrossEntropy())


def rows() -> dict[str, Any]:
    """Eight rows of unequal token counts; the last two hold none."""
    sides = [np.concatenate(x) for x in zip(*map(ref.pair, range(4)), strict=True)]
    weights = np.zeros((8, 3), np.float32)
    for row, count in enumerate((3, 1, 2, 3, 1, 1)):
        weights[row, :count] = 1
    z, y = (jnp.asarray(x, jnp.float32) for x in sides)
    labels = jnp.arange(24).reshape(8, 3)
    return {"z": z, "y": y, "weights": jnp.asarray(weights), "labels": labels}


@partial(jax.jit, static_argnums=1)
def graded(x: dict[str, Any], chunk: int | None = None) -> tuple[Any, Any]:
    """The sums, and the gradient of their sum with respect to the student."""

    def total(y: Any) -> Any:
        sides = (
            MaterialisedScores(DenseScores(y)),
            MaterialisedScores(DenseScores(x["z"])),
        )
        rest = {"weights": x["weights"], "labels": x["labels"]}
        sums = jnp.stack(term_sums(TERMS, *sides, **rest, chunk=chunk))
        return sums.sum(), sums

    slope, sums = jax.grad(total, has_aux=True)(x["y"])
    return sums, slope


def check(got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    np.testing.assert_allclose(got[0], want[0], rtol=RTOL["chunked"])
    np.testing.assert_allclose(got[1], want[1], atol=ATOL["chunked"])


def test_microbatches_of_unequal_counts_add_up_to_one_batch() -> None:
    x = rows()
    parts = [graded({k: v[i : i + 2] for k, v in x.items()}) for i in (0, 2, 4, 6)]
    sums, slopes = zip(*parts, strict=True)
    check((sum(sums), np.concatenate(slopes)), graded(x))
    # The last microbatch holds no token at all.
    assert not np.asarray(sums[-1]).any()
    assert not np.asarray(slopes[-1]).any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_columns_of_padding_change_nothing(side: str) -> None:
    x = rows()
    width = (2, 0) if side == "left" else (0, 2)
    pad = lambda v: jnp.pad(v, [(0, 0), width, *[(0, 0)] * (v.ndim - 2)])
    sums, slope = graded({k: pad(v) for k, v in x.items()})
    kept = slice(2, None) if side == "left" else slice(0, 3)
    check((sums, slope[:, kept]), graded(x))


def test_the_order_of_rows_changes_nothing() -> None:
    x = rows()
    order = jnp.asarray([5, 2, 7, 0, 1, 6, 4, 3])
    sums, slope = graded({k: v[order] for k, v in x.items()})
    want, rows_slope = graded(x)
    check((sums, slope), (want, rows_slope[order]))


@pytest.mark.parametrize("devices", [2, 8])
def test_rows_spread_over_devices_give_what_one_device_gives(devices: int) -> None:
    x = rows()
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    check(graded(spread, 1), graded(x))
