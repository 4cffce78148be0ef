"""Dense feed-forward layer of a block, with or without a gate."""

import flax.linen as nn
from jaxtyping import Array, Float

from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP
from dew.nn.linear import Linear


class FeedForward(nn.Module):
    """Feed-forward layer: down(act(gate x) · up x), or down(act(up x)) without gate.

    Shazeer, "GLU Variants Improve Transformer" (2020).
    """

    config: MLP
    embed: int
    init_std: float = 0.02

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq embed"]:
        """Returns the layer's output at every position, independent of the others."""

        def linear(name: str, inputs: int, outputs: int) -> Linear:
            return Linear(
                (inputs,),
                (outputs,),
                bias=self.config.bias,
                init_std=self.init_std,
                name=name,
            )

        act = ACTIVATIONS[self.config.activation]
        up = linear("up", self.embed, self.config.dim)(x)
        if self.config.gated:
            inner = act(linear("gate", self.embed, self.config.dim)(x)) * up
        else:
            inner = act(up)
        return linear("down", self.config.dim, self.embed)(inner)
