"""Resampling of images, one axis after the other by a table of weights."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array

from dew.bridges.lowering.ops.op import Op
from dew.bridges.lowering.ops.reduce import widen

Kernel: TypeAlias = Callable[[np.ndarray], np.ndarray]


def _linear_kernel(x: np.ndarray) -> np.ndarray:
    return np.maximum(0, 1 - np.abs(x))


def _cubic_kernel(x: np.ndarray, a: float | int) -> np.ndarray:
    """The cubic convolution kernel of Keys (1981), which torch takes with a = -0.75."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def _keys(x: np.ndarray) -> np.ndarray:
    return _cubic_kernel(x, -0.75)


def _pillow(x: np.ndarray) -> np.ndarray:
    return _cubic_kernel(x, -0.5)


def _centres(
    length: int, out: int, align_corners: bool, scale: float | int | None
) -> np.ndarray:
    """Returns where each output element lies on the input axis."""
    i = np.arange(out, dtype=np.float64)
    if align_corners:
        return i * ((length - 1) / (out - 1) if out > 1 else 0.0)
    step = length / out if scale is None else 1 / scale
    return (i + 0.5) * step - 0.5


def _table(
    length: int,
    centres: np.ndarray,
    kernel: Kernel,
    reach: int,
) -> np.ndarray:
    """Weights [out, in]; what falls outside the input goes to its edge."""
    table = np.zeros((len(centres), length), np.float64)
    first = np.floor(centres).astype(int)
    rows = np.arange(len(centres))
    for offset in range(1 - reach, reach + 1):
        taps = first + offset
        np.add.at(table, (rows, np.clip(taps, 0, length - 1)), kernel(taps - centres))
    return table.astype(np.float32)


def _antialias_table(
    length: int,
    out: int,
    kernel: Kernel,
    support: float | int,
    scale: float | int | None,
) -> np.ndarray:
    """Weights of a kernel stretched by the shrinking factor, renormalised at edges."""
    step = length / out if scale is None else 1 / scale
    stretch = max(step, 1.0)
    centres = (np.arange(out) + 0.5) * step
    table = np.zeros((out, length), np.float64)
    for row, centre in enumerate(centres):
        low = max(int(centre - support * stretch + 0.5), 0)
        high = min(int(centre + support * stretch + 0.5), length)
        taps = np.arange(low, high)
        weights = kernel((taps - centre + 0.5) / stretch)
        table[row, low:high] = weights / weights.sum()
    return table.astype(np.float32)


def _apply(x: Array, tables: Sequence[np.ndarray]) -> Array:
    out = widen(x)
    for offset, table in enumerate(tables):
        axis = 2 + offset
        out = jnp.moveaxis(jnp.tensordot(out, table, axes=(axis, 1)), -1, axis)
    return out


def _sizes(
    x: Array, output_size: Sequence[int] | None, factors: Sequence[float] | None
) -> tuple[list[int], list[float | None]]:
    """Returns output lengths and, where torch steps by them, the factors given."""
    if output_size is not None:
        return list(output_size), [None] * len(output_size)
    if factors is None:
        raise ValueError("upsampling needs output_size or scale_factors, got neither")
    lengths = [int(n * f) for n, f in zip(x.shape[2:], factors, strict=True)]
    return lengths, list(factors)


def _bilinear(
    input: Array,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Array:
    """Linear in each axis, with centres before the first element moved onto it."""
    lengths, scales = _sizes(input, output_size, scale_factors)
    tables = [
        _table(n, np.maximum(_centres(n, m, align_corners, s), 0), _linear_kernel, 1)
        for n, m, s in zip(input.shape[2:], lengths, scales, strict=True)
    ]
    return _apply(input, tables)


def _bicubic(
    input: Array,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Array:
    lengths, scales = _sizes(input, output_size, scale_factors)
    tables = [
        _table(n, _centres(n, m, align_corners, s), _keys, 2)
        for n, m, s in zip(input.shape[2:], lengths, scales, strict=True)
    ]
    return _apply(input, tables)


def _bilinear_aa(
    input: Array,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Array:
    lengths, scales = _sizes(input, output_size, scale_factors)
    tables = [
        _antialias_table(n, m, _linear_kernel, 1.0, s)
        for n, m, s in zip(input.shape[2:], lengths, scales, strict=True)
    ]
    return _apply(input, tables)


def _bicubic_aa(
    input: Array,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Array:
    lengths, scales = _sizes(input, output_size, scale_factors)
    # The antialiasing road takes a = -0.5, as Pillow does.
    tables = [
        _antialias_table(n, m, _pillow, 2.0, s)
        for n, m, s in zip(input.shape[2:], lengths, scales, strict=True)
    ]
    return _apply(input, tables)


def _nearest(
    input: Array,
    output_size: Sequence[int] | None,
    scale_factors: Sequence[float] | None,
) -> Array:
    lengths, scales = _sizes(input, output_size, scale_factors)
    for offset, (length, scale) in enumerate(zip(lengths, scales, strict=True)):
        n = input.shape[2 + offset]
        step = n / length if scale is None else 1 / scale
        places = np.minimum((np.arange(length) * np.float32(step)).astype(int), n - 1)
        input = jnp.take(input, places, axis=2 + offset)
    return input


OPS: dict[str, Op] = {
    "aten.upsample_nearest1d.vec": _nearest,
    "aten.upsample_nearest2d.vec": _nearest,
    "aten.upsample_nearest3d.vec": _nearest,
    "aten.upsample_linear1d.vec": _bilinear,
    "aten.upsample_bilinear2d.vec": _bilinear,
    "aten.upsample_trilinear3d.vec": _bilinear,
    "aten.upsample_bicubic2d.vec": _bicubic,
    "aten._upsample_bilinear2d_aa.vec": _bilinear_aa,
    "aten._upsample_bicubic2d_aa.vec": _bicubic_aa,
}
