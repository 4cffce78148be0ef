"""Linear layer, with torch's weight layout, a single rounding and LoRA.

Weights are stored as in torch, outputs first, so that a checkpoint loads as a view and
saves as its own bytes. (Measured on a CPU: also the faster order, 0.66 of the time
forward and 0.83 with gradients at 576 → 1536.)
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

LORA = "lora"
"""Collection of an adapter's scale and its dropout probability."""

FACTORS = ("lora_a", "lora_b")
"""Names of an adapter's matrices, A [rank, *inputs] and B [*outputs, rank]."""


# LoRA is part of this layer, enabled by the collection `lora` and not by a config or a
# subclass: variables alone add, change or remove adapters. Without them the same module
# computes exactly the base model, for example as the student's own teacher.
class Linear(nn.Module):
    """Linear map y = x Wᵀ + b over the last axes of x; W is [*outputs, *inputs].

    Computes in the dtype of x. Where the variables have a LoRA adapter beside W, its
    output is added; see `dew.nn.lora`.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    bias: bool = False
    init_std: float = 0.02

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns y, whose trailing axes are `outputs` in place of `inputs`."""
        shape = (*self.outputs, *self.inputs)
        weight = self.param("weight", nn.initializers.normal(self.init_std), shape)
        n_in, weight = len(self.inputs), weight.astype(x.dtype)
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, tuple(self.outputs))
            y = affine(x, weight, bias, n_in)
        else:
            y = contract(x, weight, n_in)
        return y + self._adapter_output(x) if self.has_variable(LORA, "scale") else y

    def _adapter_output(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns scale · B A x, with dropout of x where a dropout key is given."""
        a, b = (self.get_variable("params", name).astype(x.dtype) for name in FACTORS)
        scale = self.get_variable(LORA, "scale").astype(x.dtype)
        if self.has_variable(LORA, "dropout") and self.has_rng("dropout"):
            share = 1 - self.get_variable(LORA, "dropout")
            mask = jax.random.bernoulli(self.make_rng("dropout"), share, x.shape)
            x = jnp.where(mask, x / share.astype(x.dtype), jnp.zeros_like(x))
        return scale * contract(contract(x, a, len(self.inputs)), b, 1)


def contract(
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    inputs: int,
    dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Returns the product over the last `inputs` axes of x and weight.

    The result has `dtype`, by default that of x. Half precision is rounded once, at the
    end.
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
"""Largest number of products that a CPU sums in sequence."""


def affine(
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    bias: Float[Array, "..."],
    inputs: int,
) -> Float[Array, "..."]:
    """Returns the product plus a bias, rounded to half precision after the sum.

    Torch's kernels do the same. Rounded twice, logits in bfloat16 were up to 1.27 times
    as far from float32 as torch's, and are 1.02 times as far now.
    """
    if x.dtype.itemsize < 4:
        return _affine_in_half(x, weight, bias, inputs)
    y = contract(x, weight, inputs)
    return y + jax.lax.expand_dims(bias.astype(y.dtype), range(y.ndim - bias.ndim))


# A backward pass of its own, because the derived one would multiply in float32.
@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _affine_in_half(x: Array, weight: Array, bias: Array, inputs: int) -> Array:
    y = contract(x, weight, inputs, jnp.float32)
    exact = bias.astype(jnp.float32)
    return (y + jax.lax.expand_dims(exact, range(y.ndim - bias.ndim))).astype(x.dtype)


def _affine_forward(
    x: Array, weight: Array, bias: Array, inputs: int
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _affine_in_half(x, weight, bias, inputs), (x, weight, bias)


def _affine_backward(
    inputs: int, residuals: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array, Array]:
    x, weight, bias = residuals
    (to_x,) = jax.linear_transpose(lambda y: contract(y, weight, inputs), x)(cotangent)
    (to_weight,) = jax.linear_transpose(lambda w: contract(x, w, inputs), weight)(
        cotangent
    )
    leading = tuple(range(cotangent.ndim - bias.ndim))
    to_bias = jnp.sum(cotangent, axis=leading, dtype=jnp.float32)
    return to_x, to_weight, to_bias.astype(bias.dtype)


_affine_in_half.defvjp(_affine_forward, _affine_backward)
