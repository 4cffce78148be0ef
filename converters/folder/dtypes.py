"""From one dtype to another: into memory that JAX takes as it is, and back checked."""

import math

import numpy as np

from dew.converters.folder.safetensors import ALIGNMENT

_RUN = 1 << 18
"""Elements cast at a time in a checked cast: what is looked at again is in cache."""


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the array in `dtype`, rounded to the nearest; itself where it has it.

    What is new stands on 64 bytes, where XLA's CPU takes it without another copy.
    """
    if array.dtype == dtype:
        return array
    new = _aligned(array.shape, dtype)
    np.copyto(new, array, casting="unsafe")
    return new


def checked_cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts likewise, and lets no finite number become infinite.

    Raises:
        ValueError: one would.
    """
    if array.dtype == dtype:
        return array
    source = np.ascontiguousarray(array).reshape(-1)
    new = _aligned(source.shape, dtype)
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


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
