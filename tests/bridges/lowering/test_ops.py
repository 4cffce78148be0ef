"""Every op of the table, call by call, against torch itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from dew.bridges.dtypes import jax_dtype
from dew.bridges.lowering.ops import TABLE, torch_arithmetic
from tests.bridges.lowering import ops_cases
from tests.support.tolerances import DROPOUT_SHARE, RTOL

DRAWS = {
    f"aten.{name}"
    for name in (
        "rand.default randn.default rand_like.default randn_like.default "
        "bernoulli.default bernoulli.p uniform.default randint.low randint.default "
        "randperm.default empty.memory_format empty_like.default new_empty.default "
        "empty_permuted.default _assert_scalar.default"
    ).split()
}


def overload(name: str) -> Any:
    namespace, op, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), kind)


def to_jax(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        wide = value.float() if value.dtype == torch.bfloat16 else value
        return jnp.asarray(wide.numpy()).astype(jax_dtype(value.dtype))
    return jax_dtype(value) if isinstance(value, torch.dtype) else value


def compare(ours: Any, theirs: Any, tolerance: float) -> None:
    theirs = torch.as_tensor(theirs)
    want = theirs.to(torch.complex128 if theirs.is_complex() else torch.float64).numpy()
    got = np.asarray(jnp.asarray(ours).astype(jax_dtype(theirs.dtype)))
    got = got.astype(want.dtype)
    assert got.shape == want.shape
    scale = np.abs(want[np.isfinite(want)]).max(initial=1)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(("name", "number"), list(ops_cases.cases()))
def test_an_op_gives_what_torch_gives(name: str, number: int, dtype: str) -> None:
    args, kwargs = ops_cases.call(name, number, getattr(torch, dtype))
    try:
        theirs = overload(name)(*args, **kwargs)
    except RuntimeError as refusal:
        pytest.skip(f"torch itself: {str(refusal).splitlines()[0]}")
    with torch_arithmetic(), jax.default_matmul_precision("highest"):
        ours = TABLE[name](
            *pytree.tree_map(to_jax, args), **pytree.tree_map(to_jax, kwargs)
        )
    got, want = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    assert len(got) == len(want)
    for left, right in zip(got, want, strict=True):
        compare(left, right, RTOL[dtype])


def test_every_op_of_the_table_is_called_by_some_test() -> None:
    called = {name for name, _ in ops_cases.cases()}
    absent = {name for name in TABLE if name.startswith("transformers.")} | {
        name for name in TABLE if not_in_this_torch(name)
    }
    assert set(TABLE) - called - DRAWS - absent == set()


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
