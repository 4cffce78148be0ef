"""Networks small enough to compile in a second, on the model protocol."""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dew.nn.config import MLP, Attention, DecoderConfig, MoE
from dew.nn.decoder import Decoder
from dew.nn.rope import Rope
from dew.source import Source
from dew.tree import map_leaves
from dew.typing import Outputs, Path


def tiny_decoder(
    *,
    mlp: MLP | MoE | None = None,
    layers: int = 1,
    embed: int = 8,
    scan: bool = False,
    dropout: float = 0.0,
) -> Decoder:
    """A decoder of eleven words, with weights large enough for clear gradients."""
    attention = Attention(
        heads=2, kv_heads=1, head_dim=4, rope=Rope(dim=4), dropout=dropout
    )
    config = DecoderConfig(
        vocab=11,
        embed=embed,
        layers=layers,
        attention=attention,
        mlp=mlp or MLP(dim=6),
        init_std=0.4,
    )
    return Decoder(config, scan=scan)


BALANCED = MoE(experts=4, top_k=2, dim=5, scoring="sigmoid", balanced=True)


class Perceptron(nn.Module):
    """Pixels [batch, 5] to logits, optionally with batch norm and dropout."""

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
    """Patches [batch, seq, 3] to states, each with the mean of the unmasked ones."""

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
    """Unmasked states and learned positions to a prediction at every position."""

    embed: int = 6

    @nn.compact
    def __call__(self, inputs: Mapping[str, Array], **options: Any) -> Outputs:
        x, seen = inputs["inputs_embeds"], inputs["mask"][:, :, None]
        place = self.param("place", nn.initializers.normal(0.5), x.shape[1:])
        x = jnp.where(seen, x, 0)
        mean = jnp.mean(x, axis=1, keepdims=True)
        return Outputs(final=nn.Dense(self.embed)(x + mean + place[None]))


class Translator(nn.Module):
    """An encoder-decoder: the mean of the source, and the sum of the target so far."""

    vocab: int = 11
    embed: int = 6

    @nn.compact
    def __call__(self, inputs: Mapping[str, Array], **options: Any) -> Outputs:
        table = nn.Embed(self.vocab, self.embed)
        seen = inputs["mask"][:, :, None]
        summed = jnp.sum(jnp.where(seen, table(inputs["tokens"]), 0), axis=1)
        read = summed / jnp.maximum(jnp.sum(seen, axis=1), 1).astype(summed.dtype)
        past = jnp.cumsum(table(inputs["decoder_input_ids"]), axis=1)
        x = nn.tanh(nn.Dense(self.embed)(past) + read[:, None])
        return Outputs(logits=nn.Dense(self.vocab)(x))


TEXT = {"tokens": jax.ShapeDtypeStruct((1, 6), jnp.int32)}
PIXELS = {"pixels": jax.ShapeDtypeStruct((1, 5), jnp.float32)}
SEEN = {"mask": jax.ShapeDtypeStruct((1, 6), bool)}
PATCHES = {**SEEN, "patches": jax.ShapeDtypeStruct((1, 6, 3), jnp.float32)}
PAIRS = {**SEEN, **TEXT, "decoder_input_ids": jax.ShapeDtypeStruct((1, 4), jnp.int32)}
STATES = {**SEEN, "inputs_embeds": jax.ShapeDtypeStruct((1, 6, 6), jnp.float32)}


def loaded(model: nn.Module, inputs: Mapping[str, Any]) -> Source:
    """The model with weights from numpy, so that a test need not compile `init`."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), dict(inputs))
    draw = np.random.default_rng(0)

    def leaf(path: Path, shape: Any) -> Any:
        is_scale = path[-1] in ("scale", "var") or "norm" in path[-2]
        # Routers start without a bias, as they do when drawn from a key.
        values = draw.normal(size=shape.shape, scale=0.0 if path[0] == "moe" else 0.4)
        return jnp.asarray(np.ones(shape.shape) if is_scale else values, shape.dtype)

    return Source(model=model, variables=map_leaves(leaf, shapes))
