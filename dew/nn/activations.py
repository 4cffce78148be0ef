"""Activation functions, by their names in config.json files."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

Activation = Callable[[Array], Array]


def round_once(activation: Activation) -> Activation:
    """Returns the activation computed in float32 and rounded once, as torch's are.

    The backward pass stores x alone and recomputes the rest.
    """

    def in_float32(x: Array) -> Array:
        return activation(x.astype(jnp.float32)).astype(x.dtype)

    # Without recomputation the float32 copy of x would be stored for the backward pass.
    half = jax.checkpoint(in_float32, prevent_cse=False)
    return lambda x: activation(x) if x.dtype.itemsize >= 4 else half(x)


ACTIVATIONS = {
    name: round_once(activation)
    for name, activation in {
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
    }.items()
}
"""Activations by the names in Hugging Face configs."""
