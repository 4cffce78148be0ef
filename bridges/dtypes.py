"""Correspondence between the dtypes of torch and of JAX."""

import jax.numpy as jnp
import numpy as np
import torch
from jax import dtypes

_NAMES = (
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 "
    "complex128 float8_e4m3fn float8_e5m2"
).split()
_TO_JAX: dict[torch.dtype, np.dtype] = {
    getattr(torch, name): jnp.dtype(name) for name in _NAMES
}
_TO_TORCH = {array_dtype: dtype for dtype, array_dtype in _TO_JAX.items()}


def jax_stored(dtype: torch.dtype) -> np.dtype:
    """Returns JAX's dtype of the same name, bit for bit.

    Raises:
        TypeError: JAX has no such dtype.
    """
    if dtype not in _TO_JAX:
        raise TypeError(
            f"{dtype} has no counterpart in JAX; cast to one of {', '.join(_NAMES)}"
        )
    return _TO_JAX[dtype]


def jax_canonical(dtype: np.dtype) -> np.dtype:
    """Returns the dtype that JAX stores this one in: without x64, 32 bits at most."""
    return np.dtype(dtypes.canonicalize_dtype(dtype))


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """Returns the dtype of such a tensor in JAX: without x64, int64 is int32."""
    return jax_canonical(jax_stored(dtype))


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """Returns torch's dtype for a JAX or NumPy one.

    Raises:
        TypeError: torch has no such dtype.
    """
    if np.dtype(dtype) not in _TO_TORCH:
        raise TypeError(
            f"{dtype} has no counterpart in torch; cast to one of {', '.join(_NAMES)}"
        )
    return _TO_TORCH[np.dtype(dtype)]
