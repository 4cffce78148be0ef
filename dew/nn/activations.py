"""Activation functions by the names that config.json files use."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

Activation = Callable[[Array], Array]


def rounded_once(activation: Activation) -> Activation:
    """The activation worked out in float32 and rounded once, as torch's kernels do.

    The backward pass keeps x alone and works out the rest again.
    """

    def wide(x: Array) -> Array:
        return activation(x.astype(jnp.float32)).astype(x.dtype)

    lean = jax.checkpoint(wide, prevent_cse=False)
    return lambda x: activation(x) if x.dtype.itemsize >= 4 else lean(x)


ACTIVATIONS = {
    name: rounded_once(activation)
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
"""Activations by the names that Hugging Face configs use."""
