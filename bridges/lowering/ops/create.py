"""Tensors from nothing. Dtypes that torch infers stand in the graph and apply there."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from dew.bridges.lowering.ops.op import Op


def _arange(start: Any, end: Any, step: Any = 1, dtype: Any = None) -> Array:
    return jnp.arange(start, end, step)


def _arange_end(end: Any, dtype: Any = None) -> Array:
    return jnp.arange(end)


def _full(size: Sequence[int], fill_value: Any, dtype: Any = None) -> Array:
    return jnp.full(tuple(size), fill_value, dtype=dtype)


def _zeros(size: Sequence[int], dtype: Any = None) -> Array:
    return jnp.zeros(tuple(size), dtype=dtype)


def _ones(size: Sequence[int], dtype: Any = None) -> Array:
    return jnp.ones(tuple(size), dtype=dtype)


def _full_like(self: Array, fill_value: Any, dtype: Any = None) -> Array:
    return jnp.full(self.shape, fill_value, dtype=dtype)


def _new_full(
    self: Array, size: Sequence[int], fill_value: Any, dtype: Any = None
) -> Array:
    return jnp.full(tuple(size), fill_value, dtype=dtype)


def _new_zeros(self: Array, size: Sequence[int], dtype: Any = None) -> Array:
    return jnp.zeros(tuple(size), dtype=dtype or self.dtype)


def _new_ones(self: Array, size: Sequence[int], dtype: Any = None) -> Array:
    return jnp.ones(tuple(size), dtype=dtype or self.dtype)


def _zeros_like(self: Array, dtype: Any = None) -> Array:
    return jnp.zeros(self.shape, dtype=dtype or self.dtype)


def _ones_like(self: Array, dtype: Any = None) -> Array:
    return jnp.ones(self.shape, dtype=dtype or self.dtype)


def _eye(n: int, m: int | None = None, dtype: Any = None) -> Array:
    return jnp.eye(n, m)


def _linspace(start: Any, end: Any, steps: int, dtype: Any = None) -> Array:
    return jnp.linspace(start, end, steps)


def _scalar(s: Any, dtype: Any = None) -> Array:
    return jnp.asarray(s)


def _fill(self: Array, value: Any) -> Array:
    return jnp.broadcast_to(jnp.asarray(value).astype(self.dtype), self.shape)


OPS: dict[str, Op] = {
    "aten.arange.default": _arange_end,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.full.default": _full,
    "aten.zeros.default": _zeros,
    "aten.ones.default": _ones,
    # What is empty in torch holds anything; zeros are as good, and the same each time.
    "aten.empty.memory_format": _zeros,
    "aten.empty_like.default": _zeros_like,
    "aten.empty_permuted.default": lambda size, physical_layout, dtype=None: _zeros(
        size, dtype
    ),
    "aten.new_empty.default": _new_zeros,
    "aten.full_like.default": _full_like,
    "aten.zeros_like.default": _zeros_like,
    "aten.ones_like.default": _ones_like,
    "aten.new_full.default": _new_full,
    "aten.new_zeros.default": _new_zeros,
    "aten.new_ones.default": _new_ones,
    "aten.eye.default": _eye,
    "aten.eye.m": _eye,
    "aten.linspace.default": _linspace,
    "aten.scalar_tensor.default": _scalar,
    "aten.fill.Scalar": _fill,
    "aten.fill.Tensor": _fill,
    "aten.copy.default": lambda self, src, non_blocking=False: jnp.broadcast_to(
        src, self.shape
    ),
}
