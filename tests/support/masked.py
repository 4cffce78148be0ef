"""Batches with garbage behind their masks, which no objective may look at."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

GARBAGE = ((jnp.nan, -100), (jnp.inf, 2**31 - 1), (-1e38, -(2**31)))
"""What stands in floats and in integers: no numbers, no ids, and what overflows."""


def with_garbage(
    batch: Mapping[str, Any], real: Any, number: float, integer: int
) -> dict[str, Any]:
    """The batch with garbage in every array whose first axes are those of `real`."""
    spoilt = dict(batch)
    for name, leaf in batch.items():
        if leaf.shape[: real.ndim] == real.shape and leaf.dtype != bool:
            rest = (1,) * (leaf.ndim - real.ndim)
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            fill = jnp.asarray(number if is_float else integer, leaf.dtype)
            spoilt[name] = jnp.where(real.reshape(real.shape + rest), leaf, fill)
    return spoilt
