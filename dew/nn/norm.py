"""Layer and RMS normalisation, with statistics in float32."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dew.nn.config import Norm


class Normalization(nn.Module):
    """Layer or RMS normalisation over the last axis of x, by the settings of a `Norm`.

    Ba et al., "Layer Normalization" (2016); Zhang and Sennrich, "Root Mean Square Layer
    Normalization" (2019). Weights have the shape `dims`, whose last axis is x's last.
    """

    config: Norm
    dims: Sequence[int]

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns x normalised in float32, in the dtype of x."""
        c, dtype = self.config, x.dtype
        wide = x.astype(jnp.float32)
        if c.kind == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        power = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        y = wide * jax.lax.rsqrt(power + c.eps)
        if not c.float32_weight and c.kind == "rms":
            y = y.astype(dtype)
        if c.scaled:
            init = nn.initializers.constant(1 - c.offset)
            weight = self.param("weight", init, tuple(self.dims)).astype(y.dtype)
            y = y * self._spread(weight + c.offset if c.offset else weight, y)
        if c.bias:
            bias = self.param("bias", nn.initializers.zeros, tuple(self.dims))
            y = y + self._spread(bias.astype(y.dtype), y)
        return y.astype(dtype)

    def _spread(self, weight: Array, x: Array) -> Array:
        return jax.lax.expand_dims(weight, range(x.ndim - weight.ndim))
