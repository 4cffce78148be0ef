"""Calls of one ATen overload as a program makes them, compared with torch's."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch2jax
from torch.utils import _pytree as pytree

from dew.bridges.dtypes import jax_dtype
from dew.bridges.lowering.ops import torch_arithmetic
from tests.bridges.lowering import ops_cases
from tests.support.tolerances import DRAW_ERRORS, GRADIENT_TIMES, RTOL


class RefusedError(Exception):
    """Torch itself refuses a call, or its gradient."""


@contextmanager
def by_torch() -> Iterator[None]:
    """Says of an error inside that it is torch's own."""
    try:
        yield
    except RuntimeError as error:
        raise RefusedError(f"torch itself: {str(error).splitlines()[0]}") from error


def overload(name: str) -> Any:
    """The overload that torch calls by this name."""
    namespace, op, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), kind)


def to_jax(value: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    wide = value.float() if value.dtype == torch.bfloat16 else value
    return jnp.asarray(wide.detach().numpy()).astype(jax_dtype(value.dtype))


def on_arrays(function: Callable[..., Any], rng: Any = None) -> Callable[..., Any]:
    """Makes a function of torch2jax's stand-ins for tensors one of arrays."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(
            jax.Array, torch2jax.Torchish, (args, kwargs)
        )
        pooper = None if rng is None else torch2jax.RngPooper(rng)
        with torch2jax.RngPooperContext(pooper):
            result = function(*args, **kwargs)
        return pytree.tree_map_only(torch2jax.Torchish, lambda x: x.value, result)

    return call


@contextmanager
def as_in_a_program() -> Iterator[None]:
    """Promotes as torch does, and lets no warning pass."""
    with (
        warnings.catch_warnings(),
        torch_arithmetic(),
        jax.default_matmul_precision("highest"),
    ):
        warnings.simplefilter("error")
        yield


def compare(ours: Any, theirs: Any, tolerance: float) -> None:
    """Holds an array, cast to the dtype in torch, to a tensor."""
    theirs = torch.as_tensor(theirs)
    want = theirs.to(torch.complex128 if theirs.is_complex() else torch.float64).numpy()
    got = np.asarray(jnp.asarray(ours).astype(jax_dtype(theirs.dtype)))
    got = got.astype(want.dtype)
    assert got.shape == want.shape, f"shape {got.shape} for {want.shape}"
    scale = np.abs(want[np.isfinite(want)]).max(initial=1)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale)


def check_values(
    function: Callable[..., Any], name: str, number: int, dtype: str
) -> None:
    """Holds one call of the table of cases to torch's result."""
    args, kwargs = ops_cases.call(name, number, getattr(torch, dtype))
    with by_torch():
        want = pytree.tree_leaves(overload(name)(*args, **kwargs))
    args, kwargs = pytree.tree_map(to_jax, (args, kwargs))
    with as_in_a_program():
        result = on_arrays(function)(*args, **kwargs)
    got = pytree.tree_leaves(result)
    assert len(got) == len(want), f"{len(got)} results for {len(want)}"
    tolerance = RTOL["float32" if dtype == "float32" else "bfloat16"]
    for ours, theirs in zip(got, want, strict=True):
        compare(ours, theirs, tolerance)


def check_gradients(function: Callable[..., Any], name: str, number: int) -> None:
    """Holds the gradients of one float32 call to torch's, under random cotangents."""
    args, kwargs = ops_cases.call(name, number, torch.float32)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    moved = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]
    for i in moved:
        leaves[i] = leaves[i].clone().requires_grad_()
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    with by_torch():
        outputs = pytree.tree_leaves(overload(name)(*args, **kwargs))
    kept = [i for i, x in enumerate(outputs) if _is_float(x) and x.requires_grad]
    pulls = [_cotangent(outputs[i].detach()) for i in kept]
    inputs = [leaves[i] for i in moved]
    with by_torch():
        want = torch.autograd.grad(
            [outputs[i] for i in kept], inputs, pulls, materialize_grads=True
        )

    def forward(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        given = [to_jax(leaf) for leaf in leaves]
        for i, array in zip(moved, arrays, strict=True):
            given[i] = array
        args, kwargs = pytree.tree_unflatten(given, tree)
        results = pytree.tree_leaves(on_arrays(function)(*args, **kwargs))
        # The interpreter casts every result to its dtype in torch.
        return [results[i].astype(jax_dtype(outputs[i].dtype)) for i in kept]

    with as_in_a_program():
        _, pull = jax.vjp(forward, [to_jax(leaf) for leaf in inputs])
        # Of complex numbers jax's gradients are the conjugates of torch's.
        (got,) = pull([jnp.conj(to_jax(x)) for x in pulls])
    for ours, theirs in zip(got, want, strict=True):
        compare(jnp.conj(ours), theirs, GRADIENT_TIMES * RTOL["float32"])


def _cotangent(output: torch.Tensor) -> torch.Tensor:
    """Random numbers, and 0 where the output is not finite: it has no gradient."""
    rng = np.random.default_rng(0)
    drawn = torch.from_numpy(np.asarray(rng.standard_normal(output.shape)))
    return torch.where(torch.isfinite(output), drawn, 0).to(output.dtype)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (
        value.is_floating_point() or value.is_complex()
    )


def check_draw(function: Callable[..., Any], name: str, number: int) -> None:
    """Holds the shape, mean and spread of a draw to those of torch's."""
    args, kwargs = ops_cases.DRAWS[name.removeprefix("aten.")][number]
    want = overload(name)(*args, **kwargs).double()
    args, kwargs = pytree.tree_map(to_jax, (args, kwargs))
    with as_in_a_program():
        result = on_arrays(function, jax.random.key(0))(*args, **kwargs)
    got = np.asarray(result).astype(np.float64)
    assert got.shape == tuple(want.shape)
    # Errors of both means over as many draws; a spread has about the same.
    error = float(want.std()) * (2 / want.numel()) ** 0.5
    assert abs(got.mean() - float(want.mean())) <= DRAW_ERRORS * error
    assert abs(got.std() - float(want.std())) <= DRAW_ERRORS * error
