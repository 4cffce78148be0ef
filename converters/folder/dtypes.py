"""Dtype conversion into aligned memory, and with a check for overflow."""

import math

import numpy as np

from dew.converters.folder.safetensors import ALIGNMENT

_RUN = 1 << 18
"""Elements converted at a time, few enough to stay in the CPU's cache for the check."""


def convert_dtype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the array in `dtype`, rounded to nearest; itself if it has that dtype.

    New arrays are aligned to 64 bytes, where XLA's CPU uses them without another copy.
    """
    if array.dtype == dtype:
        return array
    new = _empty_aligned(array.shape, dtype)
    np.copyto(new, array, casting="unsafe")
    return new


def convert_checked(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the array in `dtype`, rounded to nearest, if every number fits.

    Args:
        name: the tensor's name, for the message.
        array: the numbers to convert.
        dtype: the new dtype.

    Raises:
        ValueError: a finite number would become infinite.
    """
    if array.dtype == dtype:
        return array
    source = np.ascontiguousarray(array).reshape(-1)
    new = _empty_aligned(source.shape, dtype)
    for start in range(0, len(source), _RUN):
        run = slice(start, start + _RUN)
        with np.errstate(over="ignore"):
            np.copyto(new[run], source[run], casting="unsafe")
        finite = np.isfinite(new[run])
        if finite.all():
            continue
        lost = ~finite & np.isfinite(source[run])
        if lost.any():
            raise ValueError(
                f"{name} holds {float(source[run][lost][0])!r}, more than {dtype} can; "
                "write it in another with dtype="
            )
    return new.reshape(array.shape)


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
