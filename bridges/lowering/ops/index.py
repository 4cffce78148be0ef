"""ATen ops that look up, gather, scatter and sort.

Torch raises on an index out of range; JAX cannot, and reads the nearest element and
drops the write. Indices are bounded by the data, so a lowered graph does not check.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dew.bridges.lowering.ops.op import Op


def _embedding(
    weight: Array,
    indices: Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    """Looks rows up; the row of `padding_idx` receives no gradient, as in torch."""
    rows = jnp.take(weight, indices, axis=0)
    if padding_idx < 0:
        return rows
    padding = (indices == padding_idx)[..., None]
    return jnp.where(padding, jax.lax.stop_gradient(rows), rows)


def _keys(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def _index(self: Array, indices: Sequence[Array | None]) -> Array:
    for index in indices:
        if index is not None and index.dtype == jnp.bool_:
            raise ValueError(
                f"indexing by a boolean mask of shape {index.shape} gives a result "
                "whose shape depends on the data, which no compiled graph can hold; "
                "write it with torch.where"
            )
    return self[_keys(indices)]


def _index_put(
    self: Array,
    indices: Sequence[Array | None],
    values: Array,
    accumulate: bool = False,
) -> Array:
    values = values.astype(self.dtype)
    masks = [i for i in indices if i is not None and i.dtype == jnp.bool_]
    if masks:
        return _masked_put(self, indices, values, accumulate)
    place = self.at[_keys(indices)]
    return place.add(values) if accumulate else place.set(values)


def _masked_put(
    self: Array, indices: Sequence[Array | None], values: Array, accumulate: bool
) -> Array:
    """Writes where one leading mask is true, if the values say nothing of which."""
    mask = indices[0]
    alone = mask is not None and all(i is None for i in indices[1:])
    rest = self.ndim - (0 if mask is None else mask.ndim)
    if not alone or values.ndim > rest or mask is None:
        raise ValueError(
            f"index_put with a boolean mask and values of shape {values.shape} puts "
            "as many values as the mask has trues, which depends on the data; use "
            "torch.where, or masked_scatter"
        )
    mask = mask.reshape(mask.shape + (1,) * rest)
    return jnp.where(mask, self + values if accumulate else values, self)


def _masked_scatter(self: Array, mask: Array, source: Array) -> Array:
    """Fills the true places with `source`'s elements in order."""
    mask = jnp.broadcast_to(mask, self.shape)
    # The nth true place takes element n of the source; clipped, since places before the
    # first true one have -1 and are not read.
    order = (jnp.cumsum(mask.ravel()) - 1).reshape(self.shape)
    return jnp.where(mask, jnp.take(source.ravel(), order, mode="clip"), self)


def _index_select(self: Array, dim: int, index: Array) -> Array:
    return jnp.take(self, index, axis=dim)


def _gather(self: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    return self[_grid(index, dim)] if self.ndim else self


def _take_along_dim(self: Array, indices: Array, dim: int | None = None) -> Array:
    return jnp.take_along_axis(self, indices, axis=dim)


def _take(self: Array, index: Array) -> Array:
    return self.ravel()[index]


def _grid(index: Array, dim: int) -> tuple[Any, ...]:
    """Returns the full index of each element that `index` names along `dim`."""
    axes = [
        jax.lax.broadcasted_iota(index.dtype, index.shape, axis)
        for axis in range(index.ndim)
    ]
    axes[dim % index.ndim] = index
    return tuple(axes)


def _scatter(self: Array, dim: int, index: Array, src: Any) -> Array:
    return self.at[_grid(index, dim)].set(_crop_source(self, index, src))


def _scatter_add(self: Array, dim: int, index: Array, src: Any) -> Array:
    return self.at[_grid(index, dim)].add(_crop_source(self, index, src))


def _crop_source(self: Array, index: Array, src: Any) -> Array:
    # Torch reads no more of the source than the corner that has the index's shape.
    src = jnp.asarray(src).astype(self.dtype)
    return src[tuple(slice(n) for n in index.shape)] if src.ndim else src


def _scatter_value(self: Array, dim: int, index: Array, value: Any) -> Array:
    return _scatter(self, dim, index, value)


def _scatter_reduce(
    self: Array,
    dim: int,
    index: Array,
    src: Array,
    reduce: str,
    include_self: bool = True,
) -> Array:
    grid, src = _grid(index, dim), _crop_source(self, index, src)
    if reduce == "mean":
        return _scatter_mean(self, grid, src, include_self)
    start = {"sum": 0, "prod": 1, "amax": -jnp.inf, "amin": jnp.inf}[reduce]
    # Places that are written to start anew; all others keep what they have.
    if not include_self:
        self = self.at[grid].set(start)
    place = self.at[grid]
    by_name: dict[str, Callable[[Array], Array]] = {
        "sum": place.add,
        "prod": place.multiply,
        "amax": place.max,
        "amin": place.min,
    }
    return by_name[reduce](src)


def _scatter_mean(
    self: Array, grid: tuple[Any, ...], src: Array, include_self: bool
) -> Array:
    base = self if include_self else self.at[grid].set(0)
    counts = (
        jnp.ones_like(self) if include_self else jnp.ones_like(self).at[grid].set(0)
    )
    return base.at[grid].add(src) / jnp.maximum(counts.at[grid].add(1), 1)


def _scatter_named(self: Array, dim: int, index: Array, src: Any, reduce: str) -> Array:
    return _scatter_reduce(
        self, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce]
    )


def _index_add(
    self: Array, dim: int, index: Array, source: Array, alpha: Any = 1
) -> Array:
    where = (slice(None),) * (dim % self.ndim) + (index,)
    return self.at[where].add((source * alpha).astype(self.dtype))


def _index_copy(self: Array, dim: int, index: Array, source: Array) -> Array:
    where = (slice(None),) * (dim % self.ndim) + (index,)
    return self.at[where].set(source.astype(self.dtype))


def _index_fill(self: Array, dim: int, index: Array, value: Any) -> Array:
    where = (slice(None),) * (dim % self.ndim) + (index,)
    return self.at[where].set(value)


def _sort(
    self: Array, dim: int = -1, descending: bool = False, stable: bool | None = True
) -> tuple[Array, Array]:
    if self.ndim == 0:
        return self, jnp.zeros((), jnp.int32)
    # Values are taken by the order, so that each passes its gradient to its own place.
    order = jnp.argsort(self, axis=dim, descending=descending, stable=True)
    return jnp.take_along_axis(self, order, axis=dim), order


def _sort_stable(
    self: Array, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Array, Array]:
    return _sort(self, dim, descending)


def _argsort(self: Array, dim: int = -1, descending: bool = False) -> Array:
    return _sort(self, dim, descending)[1]


def _argsort_stable(
    self: Array, *, stable: bool, dim: int = -1, descending: bool = False
) -> Array:
    return _sort(self, dim, descending)[1]


def _topk(
    self: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    last = jnp.moveaxis(self, dim, -1)
    if largest:
        values, indices = jax.lax.top_k(last, k)
    else:
        # Not the largest of the negatives: the least integer has none.
        values, indices = (part[..., :k] for part in _sort(last))
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(indices, -1, dim)


def _bucketize(
    self: Array, boundaries: Array, out_int32: bool = False, right: bool = False
) -> Array:
    return jnp.searchsorted(boundaries, self, side="right" if right else "left")


def _searchsorted(
    sorted_sequence: Array,
    self: Array,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    side = ("right" if right else "left") if side is None else side
    if sorted_sequence.ndim == 1:
        return jnp.searchsorted(sorted_sequence, self, side=side)
    rows = sorted_sequence.reshape(-1, sorted_sequence.shape[-1])
    wanted = self.reshape(-1, self.shape[-1])
    found = jax.vmap(lambda row, x: jnp.searchsorted(row, x, side=side))(rows, wanted)
    return found.reshape(self.shape)


def _one_hot(self: Array, num_classes: int = -1) -> Array:
    if num_classes < 0:
        raise ValueError(
            "one_hot without num_classes takes its width from the data, which no "
            "compiled graph can hold; give num_classes"
        )
    return jax.nn.one_hot(self, num_classes, dtype=jnp.int32)


def _bincount(self: Array, weights: Array | None = None, minlength: int = 0) -> Array:
    return jnp.bincount(self, weights=weights, length=minlength)


def _isin(
    elements: Array,
    test_elements: Any,
    assume_unique: bool = False,
    invert: bool = False,
) -> Array:
    return jnp.isin(elements, test_elements, invert=invert)


def _tri_indices(row: int, col: int, offset: int = 0, dtype: Any = None) -> Array:
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)), dtype=jnp.int32)


OPS: dict[str, Op] = {
    "aten.embedding.default": _embedding,
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten.masked_scatter.default": _masked_scatter,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.take_along_dim.default": _take_along_dim,
    "aten.take.default": _take,
    "aten.scatter.src": _scatter,
    "aten.scatter.value": _scatter_value,
    "aten.scatter.reduce": _scatter_named,
    "aten.scatter_add.default": _scatter_add,
    "aten.scatter_reduce.two": _scatter_reduce,
    "aten.index_add.default": _index_add,
    "aten.index_copy.default": _index_copy,
    "aten.index_fill.int_Scalar": _index_fill,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort_stable,
    "aten.argsort.default": _argsort,
    "aten.argsort.stable": _argsort_stable,
    "aten.topk.default": _topk,
    "aten.bucketize.Tensor": _bucketize,
    "aten.searchsorted.Tensor": _searchsorted,
    "aten.one_hot.default": _one_hot,
    "aten.bincount.default": _bincount,
    "aten.isin.Tensor_Tensor": _isin,
    "aten.isin.Tensor_Scalar": _isin,
    "aten.tril_indices.default": _tri_indices,
}
