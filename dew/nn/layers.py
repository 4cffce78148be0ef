"""The two layers everything is made of: a linear map and a norm.

Weights lie in memory as torch keeps them, outputs first, so that a checkpoint loads as
a view and saves as its own bytes. (Measured on a CPU: also the faster order, 0.66 of
the time forward and 0.83 with gradients at 576 → 1536.)
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Linear(nn.Module):
    """y = x Wᵀ + b over the last axes of x, the `inputs`; W is [*outputs, *inputs].

    Computes in the dtype of x.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    bias: bool = False
    init_std: float = 0.02

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Maps the trailing `inputs` axes to `outputs`."""
        shape = (*self.outputs, *self.inputs)
        weight = self.param("weight", nn.initializers.normal(self.init_std), shape)
        n_in, n_out = len(self.inputs), len(self.outputs)
        contracted = (range(x.ndim - n_in, x.ndim), range(n_out, n_out + n_in))
        y = jax.lax.dot_general(x, weight.astype(x.dtype), (contracted, ((), ())))
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, tuple(self.outputs))
            y = y + jax.lax.expand_dims(bias.astype(y.dtype), range(y.ndim - n_out))
        return y


class RMSNorm(nn.Module):
    """x / rms(x) · w in float32, rounded to the dtype of x before the weight.

    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """

    dim: int
    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalises the last axis."""
        weight = self.param("weight", nn.initializers.ones, (self.dim,))
        wide = x.astype(jnp.float32)
        power = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normal = (wide * jax.lax.rsqrt(power + self.eps)).astype(x.dtype)
        return normal * jax.lax.expand_dims(weight.astype(x.dtype), range(x.ndim - 1))


ACTIVATIONS = {
    "silu": nn.silu,
    "swish": nn.silu,
    "relu": nn.relu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_new": lambda x: nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: nn.gelu(x, approximate=True),
    "tanh": jnp.tanh,
}
"""Activations by the names that Hugging Face configs use."""
