"""The two layers everything is made of: a linear map and a norm.

Weights lie in memory as torch keeps them, outputs first, so that a checkpoint loads as
a view and saves as its own bytes. (Measured on a CPU: also the faster order, 0.66 of
the time forward and 0.83 with gradients at 576 → 1536.)
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
        n_in, weight = len(self.inputs), weight.astype(x.dtype)
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, tuple(self.outputs))
            y = affine(x, weight, bias, n_in)
        else:
            y = contract(x, weight, n_in)
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
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    inputs: int,
    dtype: Any = None,
) -> Float[Array, "..."]:
    """Sums products over the last `inputs` axes of both; in the dtype of x by default.

    Half precision is rounded once, at the end.
    """
    axes = (range(x.ndim - inputs, x.ndim), range(weight.ndim - inputs, weight.ndim))
    length = x.shape[-1]
    parts = -(-length // PART)
    is_half = x.dtype.itemsize < 4
    if inputs > 1 or parts == 1 or is_half or jax.default_backend() != "cpu":
        return jax.lax.dot_general(
            x, weight, (axes, ((), ())), preferred_element_type=dtype
        )
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


def affine(
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    bias: Float[Array, "..."],
    inputs: int,
) -> Float[Array, "..."]:
    """Adds a bias to the product; half precision is rounded after that and not before.

    Torch's kernels do the same. Rounded twice, logits in bfloat16 were up to 1.27 times
    as far from float32 as torch's, and are 1.02 times as far now.
    """
    if x.dtype.itemsize < 4:
        return _affine_in_half(x, weight, bias, inputs)
    y = contract(x, weight, inputs)
    return y + jax.lax.expand_dims(bias.astype(y.dtype), range(y.ndim - bias.ndim))


# Its own backward pass, for the products of the plain one would be float32's.
@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _affine_in_half(x: Array, weight: Array, bias: Array, inputs: int) -> Array:
    y = contract(x, weight, inputs, jnp.float32)
    wide = bias.astype(jnp.float32)
    return (y + jax.lax.expand_dims(wide, range(y.ndim - bias.ndim))).astype(x.dtype)


def _affine_forward(
    x: Array, weight: Array, bias: Array, inputs: int
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _affine_in_half(x, weight, bias, inputs), (x, weight, bias)


def _affine_backward(
    inputs: int, kept: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array, Array]:
    x, weight, bias = kept
    (to_x,) = jax.linear_transpose(lambda y: contract(y, weight, inputs), x)(cotangent)
    (to_weight,) = jax.linear_transpose(lambda w: contract(x, w, inputs), weight)(
        cotangent
    )
    leading = tuple(range(cotangent.ndim - bias.ndim))
    to_bias = jnp.sum(cotangent, axis=leading, dtype=jnp.float32)
    return to_x, to_weight, to_bias.astype(bias.dtype)


_affine_in_half.defvjp(_affine_forward, _affine_backward)
