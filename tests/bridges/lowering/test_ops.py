"""Every op that lowers, call by call, against torch itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.bridges.lowering.interpreter import handler
from dew.bridges.lowering.ops import FROM_TORCH2JAX, TABLE
from tests.bridges.lowering import ops_cases
from tests.bridges.lowering.check_op import (
    RefusedError,
    check_draw,
    check_gradients,
    check_values,
    overload,
)
from tests.support.tolerances import DROPOUT_SHARE, RTOL

UNCOMPARED = {
    f"aten.{name}"
    for name in (
        "empty.memory_format empty_like.default new_empty.default "
        "empty_permuted.default _assert_scalar.default"
    ).split()
}
"""Ops whose results torch leaves open, and one without a result."""
CASES = list(ops_cases.cases())
DRAWS = [
    (f"aten.{n}", k) for n, calls in ops_cases.DRAWS.items() for k in range(len(calls))
]

WITHOUT_GRADIENT = {("aten.scatter_reduce.two", 1)}
"""A product with repeated indices, which JAX does not differentiate."""


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(("name", "number"), CASES)
def test_an_op_gives_what_torch_gives(name: str, number: int, dtype: str) -> None:
    try:
        check_values(handler(name), name, number, dtype)
    except RefusedError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "number"), [case for case in CASES if case not in WITHOUT_GRADIENT]
)
def test_the_gradient_of_an_op_is_torchs(name: str, number: int) -> None:
    try:
        check_gradients(handler(name), name, number)
    except RefusedError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize(("name", "number"), DRAWS)
def test_a_draw_has_the_shape_mean_and_spread_of_torchs(name: str, number: int) -> None:
    check_draw(handler(name), name, number)


def test_every_op_that_lowers_is_called_by_some_test() -> None:
    lowered = {*TABLE, *FROM_TORCH2JAX}
    called = {name for name, _ in [*CASES, *DRAWS]} | UNCOMPARED
    absent = {name for name in lowered if name.startswith("transformers.")} | {
        name for name in lowered if not_in_this_torch(name)
    }
    assert lowered - called - absent == set()
    assert TABLE.keys().isdisjoint(FROM_TORCH2JAX)


def not_in_this_torch(name: str) -> bool:
    try:
        overload(name)
    except AttributeError:
        return True
    return False


def test_dropout_keeps_the_mean_and_drops_the_share_it_says() -> None:
    x = jnp.ones((200, 200))
    out = TABLE["aten.dropout.default"](x, 0.25, True, rng=jax.random.key(0))
    # Three standard deviations of a share over 40,000 draws.
    assert abs(float((out == 0).mean()) - 0.25) < DROPOUT_SHARE
    np.testing.assert_allclose(out[out != 0], 1 / 0.75, rtol=RTOL["float32"])


def test_a_draw_without_a_key_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match=r"rngs=\{'dropout'"):
        TABLE["aten.rand.default"]([2])
