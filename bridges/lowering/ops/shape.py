"""Views, joins and rearrangements. In JAX none of them aliases its input."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dew.bridges.lowering.ops.op import Op

_END = 2**62
"""Torch writes "to the end" as the largest int64; anything near it means that."""


def _same(self: Array, *unused: Any, **also_unused: Any) -> Array:
    """Returns its input: copies, casts and moves show in the result's dtype alone."""
    return self


def _reshape(self: Array, shape: Sequence[int]) -> Array:
    return jnp.reshape(self, tuple(shape))


def _expand(self: Array, size: Sequence[int], implicit: bool = False) -> Array:
    old = (1,) * (len(size) - self.ndim) + self.shape
    wanted = [
        have if want == -1 else want for want, have in zip(size, old, strict=True)
    ]
    return jnp.broadcast_to(self, wanted)


def _squeeze_dims(self: Array, dim: Sequence[int] | int) -> Array:
    dims = {d % max(self.ndim, 1) for d in np.atleast_1d(dim).tolist()}
    return jnp.squeeze(self, axis=tuple(d for d in dims if self.shape[d] == 1))


def _unsqueeze(self: Array, dim: int) -> Array:
    return jnp.expand_dims(self, dim)


def _transpose(self: Array, dim0: int, dim1: int) -> Array:
    return jnp.swapaxes(self, dim0, dim1) if self.ndim else self


def _movedim(self: Array, source: Any, destination: Any) -> Array:
    return jnp.moveaxis(self, source, destination)


def _flatten(self: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    if self.ndim == 0:
        return self.reshape(1)
    start, end = start_dim % self.ndim, end_dim % self.ndim
    return self.reshape(*self.shape[:start], -1, *self.shape[end + 1 :])


def _unflatten(self: Array, dim: int, sizes: Sequence[int]) -> Array:
    dim %= self.ndim
    return self.reshape(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])


def _span(length: int, start: int | None, end: int | None) -> tuple[int, int]:
    first = 0 if start is None else start + length if start < 0 else start
    last = length if end is None else end + length if end < 0 else end
    first = min(max(first, 0), length)
    return first, max(min(last if last < _END else length, length), first)


def _along(ndim: int, dim: int, index: Any) -> tuple[Any, ...]:
    return (slice(None),) * (dim % ndim) + (index,)


def _slice(
    self: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    first, last = _span(self.shape[dim], start, end)
    return self[_along(self.ndim, dim, slice(first, last, step))]


def _slice_scatter(
    self: Array,
    src: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    first, last = _span(self.shape[dim], start, end)
    return self.at[_along(self.ndim, dim, slice(first, last, step))].set(
        src.astype(self.dtype)
    )


def _narrow(self: Array, dim: int, start: int, length: int) -> Array:
    return _slice(self, dim, start, start % self.shape[dim] + length)


def _select(self: Array, dim: int, index: int) -> Array:
    return self[_along(self.ndim, dim, index)]


def _select_scatter(self: Array, src: Array, dim: int, index: int) -> Array:
    return self.at[_along(self.ndim, dim, index)].set(src.astype(self.dtype))


def _cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    # Torch lets an empty 1-d tensor join anything.
    real = [t for t in tensors if t.shape != (0,)]
    return jnp.concatenate(real or tensors, axis=dim)


def _stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack(tensors, axis=dim)


def _split(self: Array, split_size: int, dim: int = 0) -> list[Array]:
    cuts = range(split_size, self.shape[dim], split_size)
    return jnp.split(self, list(cuts), axis=dim)


def _split_sizes(self: Array, split_sizes: Sequence[int], dim: int = 0) -> list[Array]:
    return jnp.split(self, np.cumsum(split_sizes)[:-1].tolist(), axis=dim)


def _tensor_split(self: Array, sections: Any, dim: int = 0) -> list[Array]:
    return jnp.array_split(self, sections, axis=dim)


def _chunk(self: Array, chunks: int, dim: int = 0) -> list[Array]:
    return _split(self, max(-(-self.shape[dim] // chunks), 1), dim)


def _unbind(self: Array, dim: int = 0) -> list[Array]:
    return [self[_along(self.ndim, dim, i)] for i in range(self.shape[dim])]


def _repeat(self: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(self, tuple(repeats))


def _repeat_interleave(
    self: Array, repeats: int, dim: int | None = None, output_size: int | None = None
) -> Array:
    return jnp.repeat(self, repeats, axis=dim, total_repeat_length=output_size)


def _roll(self: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    return jnp.roll(self, tuple(shifts), tuple(dims) or None)


def _flip(self: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(self, tuple(dims))


def _pad(
    self: Array, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Array:
    """Pads the last axes first; negative widths cut, as torch lets them."""
    widths = [(0, 0)] * self.ndim
    for i in range(len(pad) // 2):
        widths[-1 - i] = (pad[2 * i], pad[2 * i + 1])
    for axis, (low, high) in enumerate(widths):
        self = _slice(self, axis, max(-low, 0), self.shape[axis] - max(-high, 0))
    grow = [(max(low, 0), max(high, 0)) for low, high in widths]
    match mode:
        case "constant":
            return jnp.pad(self, grow, constant_values=0 if value is None else value)
        case "reflect":
            return jnp.pad(self, grow, mode="reflect")
        case "replicate":
            return jnp.pad(self, grow, mode="edge")
        case "circular":
            return jnp.pad(self, grow, mode="wrap")
        case _:
            raise ValueError(
                "pad's mode must be constant, reflect, replicate or circular, "
                f"got {mode!r}"
            )


def _constant_pad(self: Array, pad: Sequence[int], value: Any = 0) -> Array:
    return _pad(self, pad, value=value)


def _tril(self: Array, diagonal: int = 0) -> Array:
    return jnp.tril(self, diagonal)


def _triu(self: Array, diagonal: int = 0) -> Array:
    return jnp.triu(self, diagonal)


def _diagonal(self: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    return jnp.diagonal(self, offset, dim1, dim2)


def _unfold(self: Array, dimension: int, size: int, step: int) -> Array:
    starts = np.arange(0, self.shape[dimension] - size + 1, step)
    windows = jnp.take(self, starts[:, None] + np.arange(size), axis=dimension)
    return jnp.moveaxis(windows, dimension % self.ndim + 1, -1)


def _as_strided(
    self: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0
) -> Array:
    """Reads a contiguous input's elements by stride, as an index table."""
    where = np.full(tuple(size), storage_offset or 0)
    for axis, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[axis] = length
        where = where + (np.arange(length) * step).reshape(shape)
    return self.ravel()[where]


def _pixel_shuffle(self: Array, upscale_factor: int) -> Array:
    r = upscale_factor
    *lead, channels, height, width = self.shape
    split = self.reshape(*lead, channels // r**2, r, r, height, width)
    n = len(lead)
    order = (*range(n + 1), n + 3, n + 1, n + 4, n + 2)
    return split.transpose(order).reshape(
        *lead, channels // r**2, height * r, width * r
    )


def _pixel_unshuffle(self: Array, downscale_factor: int) -> Array:
    r = downscale_factor
    *lead, channels, height, width = self.shape
    split = self.reshape(*lead, channels, height // r, r, width // r, r)
    n = len(lead)
    order = (*range(n + 1), n + 2, n + 4, n + 1, n + 3)
    return split.transpose(order).reshape(
        *lead, channels * r**2, height // r, width // r
    )


def _meshgrid(tensors: Sequence[Array], indexing: str = "ij") -> list[Array]:
    return list(jnp.meshgrid(*tensors, indexing=indexing))


_SAME = (
    "_to_copy.default alias.default clone.default contiguous.default lift.default "
    "lift_fresh.default lift_fresh_copy.default to.device to.dtype to.dtype_layout "
    "to.other to.prim_Device type_as.default "
    "resolve_conj.default resolve_neg.default alias_copy.default"
)

OPS: dict[str, Op] = {
    **{f"aten.{name}": _same for name in _SAME.split()},
    "aten.detach.default": jax.lax.stop_gradient,
    "aten.detach_copy.default": jax.lax.stop_gradient,
    "aten.view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.view_copy.default": _reshape,
    "aten.view_as.default": lambda self, other: self.reshape(other.shape),
    "aten.reshape_as.default": lambda self, other: self.reshape(other.shape),
    "aten.expand.default": _expand,
    "aten.expand_copy.default": _expand,
    "aten.expand_as.default": lambda self, other: _expand(self, other.shape),
    "aten.broadcast_to.default": _expand,
    "aten.broadcast_tensors.default": lambda tensors: jnp.broadcast_arrays(*tensors),
    "aten.squeeze.default": jnp.squeeze,
    "aten.squeeze.dim": _squeeze_dims,
    "aten.squeeze.dims": _squeeze_dims,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.transpose.int": _transpose,
    "aten.swapaxes.default": _transpose,
    "aten.swapdims.default": _transpose,
    "aten.t.default": lambda self: self.T,
    "aten.numpy_T.default": lambda self: self.T,
    "aten.mT.default": lambda self: jnp.swapaxes(self, -1, -2),
    "aten.adjoint.default": lambda self: jnp.conj(jnp.swapaxes(self, -1, -2)),
    "aten.movedim.int": _movedim,
    "aten.movedim.intlist": _movedim,
    "aten.flatten.using_ints": _flatten,
    "aten.unflatten.int": _unflatten,
    "aten.slice.Tensor": _slice,
    "aten.slice_copy.Tensor": _slice,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.narrow.default": _narrow,
    "aten.select.int": _select,
    "aten.select_copy.int": _select,
    "aten.select_scatter.default": _select_scatter,
    "aten.cat.default": _cat,
    "aten.concat.default": _cat,
    "aten.stack.default": _stack,
    "aten.hstack.default": jnp.hstack,
    "aten.vstack.default": jnp.vstack,
    "aten.split.Tensor": _split,
    "aten.split.sizes": _split_sizes,
    "aten.split_with_sizes.default": _split_sizes,
    "aten.split_copy.Tensor": _split,
    "aten.split_with_sizes_copy.default": _split_sizes,
    "aten.tensor_split.sections": _tensor_split,
    "aten.tensor_split.indices": _tensor_split,
    "aten.chunk.default": _chunk,
    "aten.unsafe_chunk.default": _chunk,
    "aten.unbind.int": _unbind,
    "aten.unbind_copy.int": _unbind,
    "aten.repeat.default": _repeat,
    "aten.tile.default": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.roll.default": _roll,
    "aten.flip.default": _flip,
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": _constant_pad,
    "aten.reflection_pad1d.default": lambda self, pad: _pad(self, pad, "reflect"),
    "aten.reflection_pad2d.default": lambda self, pad: _pad(self, pad, "reflect"),
    "aten.replication_pad1d.default": lambda self, pad: _pad(self, pad, "replicate"),
    "aten.replication_pad2d.default": lambda self, pad: _pad(self, pad, "replicate"),
    "aten.tril.default": _tril,
    "aten.triu.default": _triu,
    "aten.diagonal.default": _diagonal,
    "aten.unfold.default": _unfold,
    "aten.as_strided.default": _as_strided,
    "aten.pixel_shuffle.default": _pixel_shuffle,
    "aten.pixel_unshuffle.default": _pixel_unshuffle,
    "aten.meshgrid.default": _meshgrid,
    "aten.meshgrid.indexing": _meshgrid,
    "aten.atleast_1d.default": jnp.atleast_1d,
    "aten.atleast_2d.default": jnp.atleast_2d,
}
