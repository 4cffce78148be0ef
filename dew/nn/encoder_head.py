"""Heads of an encoder: pooled vectors, vocabulary logits, classification logits."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from dew.nn.activations import ACTIVATIONS
from dew.nn.config import EncoderConfig
from dew.nn.embedding import Unembedding
from dew.nn.linear import Linear
from dew.nn.norm import Normalization


class EncoderHead(nn.Module):
    """Logits and pooled vector of an encoder, as its config's `readout` has them.

    Submodules are named by the readout's `kind`. A table of the head's own is in
    `vocab_own`; `vocab_tied` holds the bias beside the embedding's table.
    """

    config: EncoderConfig

    @nn.compact
    def __call__(
        self,
        final: Float[Array, "batch seq embed"],
        mask: Array | None,
        table: Float[Array, "vocab width"] | None,
    ) -> tuple[Array | None, Float[Array, "batch embed"] | None]:
        """Returns float32 logits and the pooled vector, None where there are none."""
        c, read = self.config, self.config.readout
        x = self._dense(_pool(final, mask, read.pool))
        pooled = None if read.pool is None else x
        if read.head is not None:
            init = nn.initializers.normal(c.init_std)
            name = "vocab_own" if table is None else "vocab_tied"
            scores = Unembedding(read.head, c.vocab, x.shape[-1], init, name=name)
            return scores(x, table), pooled
        if read.labels is None:
            return None, pooled
        logits = self._linear(x, read.labels, "scores").astype(jnp.float32)
        return (logits[..., 0] if read.single else logits), pooled

    def _dense(self, x: Array) -> Array:
        c, dense = self.config, self.config.readout.dense
        if dense is None:
            return x
        # A tied table has the embedding's width, which may differ from the states'.
        width = c.embedding_width if c.readout.head and c.embedding_width else c.embed
        x = self._linear(x, width, "dense", bias=dense.bias)
        x = ACTIVATIONS[dense.activation or c.mlp.activation](x)
        if not dense.normed:
            return x
        return Normalization(c.norm, (width,), name=f"{c.readout.kind}_norm")(x)

    def _linear(self, x: Array, outputs: int, part: str, *, bias: bool = True) -> Array:
        c = self.config
        return Linear(
            x.shape[-1:],
            (outputs,),
            bias=bias,
            init_std=c.init_std,
            name=f"{c.readout.kind}_{part}",
        )(x)


def _pool(x: Array, mask: Array | None, pool: str | None) -> Array:
    """Returns one vector per text, or all positions where `pool` is None."""
    if pool is None:
        return x
    if pool == "first":
        return x[:, 0]
    if mask is None:
        return jnp.mean(x, axis=1)
    real = mask.astype(x.dtype)[..., None]
    return jnp.sum(x * real, axis=1) / jnp.maximum(jnp.sum(real, axis=1), 1)
