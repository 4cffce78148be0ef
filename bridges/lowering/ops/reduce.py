"""Reductions, running sums and softmax.

Sums of half-width floats run in float32, as torch's kernels run them.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dew.bridges.lowering.ops.op import Op
from dew.bridges.lowering.ops.pointwise import absolute

Dims: TypeAlias = Sequence[int] | int | None


def _axes(dim: Dims) -> tuple[int, ...] | int | None:
    """Returns jax's axis; torch's empty list means every axis, like None."""
    if dim is None or isinstance(dim, int):
        return dim
    return tuple(dim) or None


def widen(x: Array, dtype: Any = None) -> Array:
    """Widens a half-width float to float32; other dtypes stay, or become `dtype`."""
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return x.astype(jnp.float32 if half else dtype)


def _sum(
    self: Array, dim: Dims = None, keepdim: bool = False, dtype: Any = None
) -> Array:
    return jnp.sum(widen(self, dtype), axis=_axes(dim), keepdims=keepdim)


def _sum_all(self: Array, dtype: Any = None) -> Array:
    return _sum(self, dtype=dtype)


def _mean(
    self: Array, dim: Dims = None, keepdim: bool = False, dtype: Any = None
) -> Array:
    return jnp.mean(widen(self, dtype), axis=_axes(dim), keepdims=keepdim)


def _mean_all(self: Array, dtype: Any = None) -> Array:
    return _mean(self, dtype=dtype)


def _prod(self: Array, dim: int, keepdim: bool = False, dtype: Any = None) -> Array:
    return jnp.prod(widen(self, dtype), axis=dim, keepdims=keepdim)


def _prod_all(self: Array, dtype: Any = None) -> Array:
    return jnp.prod(widen(self, dtype))


def _amax(self: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    return jnp.max(self, axis=_axes(dim), keepdims=keepdim)


def _amin(self: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    return jnp.min(self, axis=_axes(dim), keepdims=keepdim)


def _take_one(
    self: Array, index: Array, dim: int, keepdim: bool
) -> tuple[Array, Array]:
    """Takes one element along `dim`, so that it alone receives the gradient."""
    index = jnp.expand_dims(index, dim)
    value = jnp.take_along_axis(self, index, axis=dim)
    if keepdim:
        return value, index
    return jnp.squeeze(value, dim), jnp.squeeze(index, dim)


def _max_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return _take_one(self, jnp.argmax(self, axis=dim), dim, keepdim)


def _min_dim(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return _take_one(self, jnp.argmin(self, axis=dim), dim, keepdim)


def _argmax(self: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return jnp.argmax(self, axis=dim, keepdims=keepdim)


def _argmin(self: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return jnp.argmin(self, axis=dim, keepdims=keepdim)


def _any(self: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return jnp.any(self, axis=_axes(dim), keepdims=keepdim)


def _all(self: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return jnp.all(self, axis=_axes(dim), keepdims=keepdim)


def _var(
    self: Array,
    dim: Dims = None,
    unbiased: bool = True,
    keepdim: bool = False,
    correction: float | int | None = None,
) -> Array:
    taken = (1.0 if unbiased else 0.0) if correction is None else correction
    x, axes = widen(self), _axes(dim)
    spread = jnp.square(x - jnp.mean(x, axis=axes, keepdims=True))
    total = jnp.sum(spread, axis=axes, keepdims=keepdim)
    count = self.size if axes is None else np.prod([self.shape[a] for a in _many(axes)])
    return total / (float(count) - taken)


def _many(axes: tuple[int, ...] | int) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else axes


def _var_correction(
    self: Array,
    dim: Dims = None,
    correction: float | int | None = 1,
    keepdim: bool = False,
) -> Array:
    return _var(
        self, dim, correction=1 if correction is None else correction, keepdim=keepdim
    )


def _std_correction(
    self: Array,
    dim: Dims = None,
    correction: float | int | None = 1,
    keepdim: bool = False,
) -> Array:
    return jnp.sqrt(_var_correction(self, dim, correction, keepdim))


def _var_mean(
    self: Array,
    dim: Dims = None,
    correction: float | int | None = 1,
    keepdim: bool = False,
) -> tuple[Array, Array]:
    return _var_correction(self, dim, correction, keepdim), _mean(self, dim, keepdim)


def _std_mean(
    self: Array,
    dim: Dims = None,
    correction: float | int | None = 1,
    keepdim: bool = False,
) -> tuple[Array, Array]:
    return _std_correction(self, dim, correction, keepdim), _mean(self, dim, keepdim)


def _norm(
    self: Array, p: Any = 2, dim: Dims = None, keepdim: bool = False, dtype: Any = None
) -> Array:
    """Vector norm over `dim`; torch's gradient at the zero vector is 0, and so here."""
    x, axes = widen(self, dtype), _axes(dim)
    p = 2 if p is None else p
    if p == 0:
        return jnp.sum(x != 0, axis=axes, keepdims=keepdim)
    if np.isinf(p):
        extreme = jnp.max if p > 0 else jnp.min
        return extreme(jnp.abs(x), axis=axes, keepdims=keepdim)
    if p == 1:
        return jnp.sum(absolute(x), axis=axes, keepdims=keepdim)
    total = jnp.sum(
        jnp.square(x) if p == 2 else jnp.abs(x) ** p, axis=axes, keepdims=keepdim
    )
    safe = jnp.where(total > 0, total, 1)
    return jnp.where(total > 0, safe ** (1 / p), 0)


def _vector_norm(
    self: Array,
    ord: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> Array:
    return _norm(self, ord, dim, keepdim, dtype)


def _logsumexp(self: Array, dim: Dims, keepdim: bool = False) -> Array:
    return jax.nn.logsumexp(widen(self), axis=_axes(dim), keepdims=keepdim)


def _softmax(self: Array, dim: int, dtype: Any = None) -> Array:
    return jax.nn.softmax(widen(self, dtype), axis=dim)


def _log_softmax(self: Array, dim: int, dtype: Any = None) -> Array:
    return jax.nn.log_softmax(widen(self, dtype), axis=dim)


def _to_float(self: Array, dim: int, half_to_float: bool = False) -> Array:
    return _softmax(self, dim)


def _log_to_float(self: Array, dim: int, half_to_float: bool = False) -> Array:
    return _log_softmax(self, dim)


def _cumsum(self: Array, dim: int, dtype: Any = None) -> Array:
    return jnp.cumsum(widen(self, dtype), axis=dim) if self.ndim else self


def _cumprod(self: Array, dim: int, dtype: Any = None) -> Array:
    return jnp.cumprod(widen(self, dtype), axis=dim) if self.ndim else self


def _logcumsumexp(self: Array, dim: int) -> Array:
    return jax.lax.cumlogsumexp(widen(self), axis=dim % self.ndim)


def _cummax(self: Array, dim: int) -> tuple[Array, Array]:
    axis = dim % self.ndim
    values = jax.lax.cummax(self, axis=axis)
    places = jax.lax.broadcasted_iota(jnp.int32, self.shape, axis)
    return values, jax.lax.cummax(jnp.where(self == values, places, 0), axis=axis)


def _diff(
    self: Array, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> Array:
    if jnp.issubdtype(self.dtype, jnp.bool_):
        ends = {"prepend": prepend, "append": append}
        parts = [ends["prepend"], self, ends["append"]]
        joined = jnp.concatenate([p for p in parts if p is not None], axis=dim)
        return jnp.diff(joined.astype(jnp.int32), n, axis=dim) != 0
    return jnp.diff(self, n, axis=dim, prepend=prepend, append=append)


def _histc(
    self: Array, bins: int = 100, min: float | int = 0, max: float | int = 0
) -> Array:
    """Counts into equal bins; with min == max torch spans the data, and so here."""
    x = self.astype(jnp.float32).ravel()
    low, high = (
        (x.min(), x.max()) if min == max else (jnp.float32(min), jnp.float32(max))
    )
    place = jnp.floor((x - low) / (high - low) * bins).astype(jnp.int32)
    place = jnp.where(x == high, bins - 1, place)
    inside = (x >= low) & (x <= high)
    return (
        jnp.zeros(bins, jnp.int32)
        .at[jnp.where(inside, place, bins)]
        .add(1, mode="drop")
    )


def _count_nonzero(self: Array, dim: Dims = None) -> Array:
    return jnp.sum(self != 0, axis=_axes(dim))


OPS: dict[str, Op] = {
    "aten.sum.default": _sum_all,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.default": _mean_all,
    "aten.mean.dim": _mean,
    "aten.prod.default": _prod_all,
    "aten.prod.dim_int": _prod,
    "aten.amax.default": _amax,
    "aten.amin.default": _amin,
    "aten.max.default": jnp.max,
    "aten.min.default": jnp.min,
    "aten.max.dim": _max_dim,
    "aten.min.dim": _min_dim,
    "aten.argmax.default": _argmax,
    "aten.argmin.default": _argmin,
    "aten.any.default": _any,
    "aten.any.dim": _any,
    "aten.any.dims": _any,
    "aten.all.default": _all,
    "aten.all.dim": _all,
    "aten.all.dims": _all,
    "aten.var.default": lambda self, unbiased=True: _var(self, unbiased=unbiased),
    "aten.var.dim": _var,
    "aten.var.correction": _var_correction,
    "aten.std.default": lambda self, unbiased=True: jnp.sqrt(
        _var(self, unbiased=unbiased)
    ),
    "aten.std.dim": lambda *args, **kwargs: jnp.sqrt(_var(*args, **kwargs)),
    "aten.std.correction": _std_correction,
    "aten.var_mean.correction": _var_mean,
    "aten.std_mean.correction": _std_mean,
    "aten.norm.Scalar": _norm,
    "aten.norm.ScalarOpt_dim": _norm,
    "aten.linalg_vector_norm.default": _vector_norm,
    "aten.linalg_norm.default": _vector_norm,
    "aten.logsumexp.default": _logsumexp,
    "aten.softmax.int": _softmax,
    "aten._softmax.default": _to_float,
    "aten.special_softmax.default": _softmax,
    "aten.log_softmax.int": _log_softmax,
    "aten._log_softmax.default": _log_to_float,
    "aten.cumsum.default": _cumsum,
    "aten.cumprod.default": _cumprod,
    "aten.logcumsumexp.default": _logcumsumexp,
    "aten.cummax.default": _cummax,
    "aten.diff.default": _diff,
    "aten.histc.default": _histc,
    "aten.count_nonzero.default": _count_nonzero,
    "aten.count_nonzero.dim_IntList": _count_nonzero,
}
