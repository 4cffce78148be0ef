"""The two layers everything is made of: a linear map and a norm.

Weights lie in memory as torch keeps them, outputs first, so that a checkpoint loads as
a view and saves as its own bytes. (Measured on a CPU: also the faster order, 0.66 of
the time forward and 0.83 with gradients at 576 → 1536.)
"""

from collections.abc import Sequence
from itertools import pairwise

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dew.nn.config import Norm

LORA = "lora"
"""The collection of what an adapter is multiplied by, and dropped with."""

FACTORS = ("lora_a", "lora_b")
"""An adapter's matrices beside the weight: [rank, *inputs] and [*outputs, rank]."""


class Linear(nn.Module):
    """y = x Wᵀ + b over the last axes of x, the `inputs`; W is [*outputs, *inputs].

    Computes in the dtype of x. Where the variables hold a low-rank adapter beside W,
    what it says is added, see `dew.nn.lora`.
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
        y = contract(x, weight.astype(x.dtype), n_in)
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, tuple(self.outputs))
            y = y + jax.lax.expand_dims(bias.astype(y.dtype), range(y.ndim - n_out))
        return y + self._adapted(x) if self.has_variable(LORA, "scale") else y

    def _adapted(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns scale · B A x, with dropout of x where a dropout key is given."""
        a, b = (self.get_variable("params", name).astype(x.dtype) for name in FACTORS)
        scale = self.get_variable(LORA, "scale").astype(x.dtype)
        if self.has_variable(LORA, "dropout") and self.has_rng("dropout"):
            share = 1 - self.get_variable(LORA, "dropout")
            kept = jax.random.bernoulli(self.make_rng("dropout"), share, x.shape)
            x = jnp.where(kept, x / share.astype(x.dtype), jnp.zeros_like(x))
        return scale * contract(contract(x, a, len(self.inputs)), b, 1)


def contract(
    x: Float[Array, "..."], weight: Float[Array, "..."], inputs: int
) -> Float[Array, "..."]:
    """Sums products over the last `inputs` axes of both."""
    axes = (range(x.ndim - inputs, x.ndim), range(weight.ndim - inputs, weight.ndim))
    length = x.shape[-1]
    parts = -(-length // PART)
    if inputs > 1 or parts == 1 or jax.default_backend() != "cpu":
        return jax.lax.dot_general(x, weight, (axes, ((), ())))
    # A CPU adds products one after the other. In parts, SmolLM2's logits are 0.8e-4
    # from their float64 values instead of 1.5e-4 (torch's: 0.7e-4), for some 1.15 of
    # the time of a product forward and no more with gradients.
    bounds = [length * i // parts for i in range(parts + 1)]
    sums = [
        jax.lax.dot_general(x[..., a:b], weight[..., a:b], (axes, ((), ())))
        for a, b in pairwise(bounds)
    ]
    return sum(sums[1:], sums[0])


PART = 288
"""The longest run of products that a CPU adds up in one go."""


class Normalize(nn.Module):
    """The norm that a `Norm` describes, over the last axis of x.

    Ba et al., "Layer Normalization" (2016); Zhang and Sennrich, "Root Mean Square Layer
    Normalization" (2019). Weights have the shape `dims`, whose last axis is x's last.
    """

    config: Norm
    dims: Sequence[int]

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalises in float32 and returns the dtype of x."""
        c, dtype = self.config, x.dtype
        wide = x.astype(jnp.float32)
        if c.kind == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        power = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        y = wide * jax.lax.rsqrt(power + c.eps)
        if not c.wide and c.kind == "rms":
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


ACTIVATIONS = {
    "silu": nn.silu,
    "swish": nn.silu,
    "relu": nn.relu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_new": lambda x: nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: nn.gelu(x, approximate=True),
    "gelu_fast": lambda x: nn.gelu(x, approximate=True),
    "gelu_python": lambda x: nn.gelu(x, approximate=False),
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
    "relu2": lambda x: jnp.square(nn.relu(x)),
    "tanh": jnp.tanh,
}
"""Activations by the names that Hugging Face configs use."""
