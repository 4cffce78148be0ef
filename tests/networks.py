"""Networks small enough to compile in a second, on the model protocol."""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array

from dew.nn.config import MLP, Attention, DecoderConfig, MoE
from dew.nn.decoder import Decoder
from dew.nn.rope import Rope
from dew.typing import Outputs


def tiny_decoder(
    *,
    mlp: MLP | MoE | None = None,
    layers: int = 1,
    scan: bool = False,
    dropout: float = 0.0,
) -> Decoder:
    """A decoder of eleven words; weights large enough for gradients to be seen."""
    attention = Attention(
        heads=2, kv_heads=1, head_dim=4, rope=Rope(dim=4), dropout=dropout
    )
    config = DecoderConfig(
        vocab=11,
        embed=8,
        layers=layers,
        attention=attention,
        mlp=mlp or MLP(dim=6),
        init_std=0.4,
    )
    return Decoder(config, scan=scan)


BALANCED = MoE(experts=4, top_k=2, dim=5, scoring="sigmoid", balanced=True)


class Perceptron(nn.Module):
    """Pixels [batch, 5] to logits, with batch norm and dropout where asked."""

    classes: int = 3
    norm: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self,
        inputs: Mapping[str, Array],
        *,
        train: bool = False,
        layers: Sequence[int] = (),
    ) -> Outputs:
        x = nn.Dense(6)(inputs["pixels"])
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(nn.tanh(x))
        return Outputs(logits=nn.Dense(self.classes)(x))


class Encoder(nn.Module):
    """Patches [batch, seq, 3] to states, each beside the mean of all that are seen."""

    embed: int = 6

    @nn.compact
    def __call__(
        self,
        inputs: Mapping[str, Array],
        *,
        train: bool = False,
        layers: Sequence[int] = (),
    ) -> Outputs:
        seen = inputs["mask"][:, :, None]
        x = nn.Dense(self.embed)(inputs["patches"])
        summed = jnp.sum(jnp.where(seen, x, 0), axis=1, keepdims=True)
        count = jnp.maximum(jnp.sum(seen, axis=1, keepdims=True), 1)
        return Outputs(final=nn.tanh(x + summed / count.astype(x.dtype)))


class Guesser(nn.Module):
    """States where they are seen, and places, to a guess at every position."""

    embed: int = 6

    @nn.compact
    def __call__(self, inputs: Mapping[str, Array], **options: Any) -> Outputs:
        x, seen = inputs["inputs_embeds"], inputs["mask"][:, :, None]
        place = self.param("place", nn.initializers.normal(0.5), x.shape[1:])
        x = jnp.where(seen, x, 0)
        mean = jnp.mean(x, axis=1, keepdims=True)
        return Outputs(final=nn.Dense(self.embed)(x + mean + place[None]))
