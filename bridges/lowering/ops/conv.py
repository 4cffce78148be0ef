"""Convolutions, pooling and resampling, channels first as torch has them."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dew.bridges.lowering.ops.op import Op
from dew.bridges.lowering.ops.reduce import widen

Sizes: TypeAlias = Sequence[int] | int


def _each(sizes: Sizes, rank: int) -> tuple[int, ...]:
    many = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return many * rank if len(many) == 1 else many


def _with_batch(x: Array, rank: int) -> tuple[Array, bool]:
    """Adds the batch axis that torch lets a single example leave out."""
    return (x[None], True) if x.ndim == rank + 1 else (x, False)


def _padding(
    padding: Sizes | str, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        # Torch puts the odd element at the end.
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, str):
        raise ValueError(f"a conv's padding must be same or valid, got {padding!r}")
    return [(p, p) for p in _each(padding, len(kernel))]


def _conv(
    input: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Array:
    rank = weight.ndim - 2
    x, single = _with_batch(input, rank)
    dilation = _each(dilation, rank)
    out = jax.lax.conv_general_dilated(
        x,
        weight.astype(x.dtype),
        window_strides=_each(stride, rank),
        padding=_padding(padding, weight.shape[2:], dilation),
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    if bias is not None:
        out = out + bias.reshape((1, -1) + (1,) * rank)
    return out[0] if single else out


def _conv_transpose(
    input: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Array:
    """The gradient of a conv with respect to its input, as a dilated conv."""
    rank = weight.ndim - 2
    x, single = _with_batch(input, rank)
    stride, padding, dilation, extra = (
        _each(sizes, rank) for sizes in (stride, padding, dilation, output_padding)
    )
    spatial = tuple(range(2, rank + 2))
    # [in, out / groups, …] to [out, in / groups, …], each group by itself.
    kernel = weight.reshape(groups, -1, *weight.shape[1:])
    kernel = jnp.swapaxes(kernel, 1, 2).reshape(
        -1, weight.shape[0] // groups, *weight.shape[2:]
    )
    # An output reads all inputs whose windows would have covered it: the kernel turned
    # round, over inputs that stand `stride` apart, from one kernel before the edge.
    edges = [
        (d * (k - 1) - p, d * (k - 1) - p + e)
        for k, d, p, e in zip(weight.shape[2:], dilation, padding, extra, strict=True)
    ]
    out = jax.lax.conv_general_dilated(
        x,
        jnp.flip(kernel, spatial).astype(x.dtype),
        window_strides=(1,) * rank,
        padding=edges,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    if bias is not None:
        out = out + bias.reshape((1, -1) + (1,) * rank)
    return out[0] if single else out


def _convolution(
    input: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Array:
    if transposed:
        return _conv_transpose(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return _conv(input, weight, bias, stride, padding, dilation, groups)


def _window(
    length: int, kernel: int, stride: int, pad: int, dilation: int, ceil_mode: bool
) -> tuple[int, int]:
    """Returns the padding of one axis; ceil mode adds what the last window lacks."""
    span = dilation * (kernel - 1) + 1
    reach = length + 2 * pad - span
    count = -(-reach // stride) if ceil_mode else reach // stride
    # Torch drops a last window that would start in the right padding.
    if ceil_mode and count * stride >= length + pad:
        count -= 1
    return pad, max(count * stride + span - length - pad, 0)


def _max_pool(
    self: Array,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    *,
    rank: int,
) -> Array:
    kernel = _each(kernel_size, rank)
    strides = _each(stride, rank) or kernel
    pads, dilations = _each(padding, rank), _each(dilation, rank)
    x, single = _with_batch(self, rank)
    edges = [
        _window(n, k, s, p, d, ceil_mode)
        for n, k, s, p, d in zip(
            x.shape[2:], kernel, strides, pads, dilations, strict=True
        )
    ]
    # From -inf, so that padding never is the largest.
    out = jax.lax.reduce_window(
        x,
        -jnp.inf,
        jax.lax.max,
        (1, 1, *kernel),
        (1, 1, *strides),
        [(0, 0), (0, 0), *edges],
        window_dilation=(1, 1, *dilations),
    )
    return out[0] if single else out


def _window_sum(
    x: Array,
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    edges: list[tuple[int, int]],
) -> Array:
    return jax.lax.reduce_window(
        x,
        0.0,
        jax.lax.add,
        (1, 1, *kernel),
        (1, 1, *strides),
        [(0, 0), (0, 0), *edges],
    )


def _avg_pool(
    self: Array,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    rank: int,
) -> Array:
    kernel = _each(kernel_size, rank)
    strides = _each(stride, rank) or kernel
    pads = _each(padding, rank)
    x, single = _with_batch(widen(self), rank)
    edges = [
        _window(n, k, s, p, 1, ceil_mode)
        for n, k, s, p in zip(x.shape[2:], kernel, strides, pads, strict=True)
    ]
    total = _window_sum(x, kernel, strides, edges)
    if divisor_override is None:
        # Padding counts where it is asked to; what ceil mode adds beyond never does.
        inner = [(p if count_include_pad else 0,) * 2 for p in pads]
        ones = jnp.pad(
            jnp.ones((1, 1, *x.shape[2:]), x.dtype),
            [(0, 0), (0, 0), *inner],
            constant_values=1,
        )
        outer = [
            (low - i[0], high - i[1])
            for (low, high), i in zip(edges, inner, strict=True)
        ]
        out = total / _window_sum(ones, kernel, strides, outer)
    else:
        out = total / divisor_override
    return out[0] if single else out


def _adaptive_avg_pool(self: Array, output_size: Sizes, *, rank: int) -> Array:
    """Averages each axis over torch's bins: floor(i·n/m) to ceil((i+1)·n/m)."""
    sizes = _each(output_size, rank)
    out = widen(self)
    # Bins may overlap and differ in length, as no window does: a product with a table
    # of their weights averages one axis at a time.
    for offset, bins in enumerate(sizes):
        axis = self.ndim - rank + offset
        length = self.shape[axis]
        table = np.zeros((bins, length), np.float32)
        for i in range(bins):
            start, end = i * length // bins, -(-(i + 1) * length // bins)
            table[i, start:end] = 1 / (end - start)
        out = jnp.moveaxis(jnp.tensordot(out, table, axes=(axis, 1)), -1, axis)
    return out


def _unfold(
    input: Array,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> Array:
    x, single = _with_batch(input, 2)
    kernel, dilation = _each(kernel_size, 2), _each(dilation, 2)
    # Patches are cut by a conv with kernels of one 1: at a lower precision an
    # accelerator would round the numbers that it copies.
    patches = jax.lax.conv_general_dilated_patches(
        x,
        kernel,
        _each(stride, 2),
        _padding(padding, kernel, dilation),
        rhs_dilation=dilation,
        precision=jax.lax.Precision.HIGHEST,
    )
    out = patches.reshape(*patches.shape[:2], -1)
    return out[0] if single else out


def _fold(
    input: Array,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> Array:
    kernel = _each(kernel_size, 2)
    channels = input.shape[-2] // math.prod(kernel)
    shape = (*input.shape[:-2], channels, *_each(output_size, 2))
    whole = jax.ShapeDtypeStruct(shape, input.dtype)
    taken = lambda image: _unfold(image, kernel, dilation, padding, stride)
    # Every patch goes back to where it was taken from, added up.
    return jax.linear_transpose(taken, whole)(input)[0]


OPS: dict[str, Op] = {
    "aten.im2col.default": _unfold,
    "aten.col2im.default": _fold,
    **{f"aten.conv{n}d.default": _conv for n in (1, 2, 3)},
    **{f"aten.conv{n}d.padding": _conv for n in (1, 2, 3)},
    "aten.conv_transpose1d.default": _conv_transpose,
    "aten.conv_transpose2d.input": _conv_transpose,
    "aten.conv_transpose3d.input": _conv_transpose,
    "aten.convolution.default": _convolution,
    **{
        f"aten.max_pool{n}d.default": lambda *args, n=n, **kwargs: _max_pool(
            *args, rank=n, **kwargs
        )
        for n in (1, 2, 3)
    },
    **{
        f"aten.avg_pool{n}d.default": lambda *args, n=n, **kwargs: _avg_pool(
            *args, rank=n, **kwargs
        )
        for n in (1, 2, 3)
    },
    **{
        f"aten.adaptive_avg_pool{n}d.default": lambda *args, n=n: _adaptive_avg_pool(
            *args, rank=n
        )
        for n in (1, 2, 3)
    },
}
