"""Tables with a row for each token: from ids to vectors, and from vectors to scores."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from dew.nn.config import Head


class Table(nn.Module):
    """One row of `dim` numbers for each of `rows` tokens."""

    rows: int
    dim: int
    init: Any

    @nn.compact
    def __call__(self) -> Float[Array, "rows dim"]:
        """The whole table."""
        return self.param("weight", self.init, (self.rows, self.dim))


class Unembedding(nn.Module):
    """From hidden states to logits, with a table of its own unless one is given."""

    config: Head
    rows: int
    dim: int
    init: Any

    @nn.compact
    def __call__(
        self,
        final: Float[Array, "batch seq embed"],
        table: Float[Array, "vocab embed"] | None,
    ) -> Float[Array, "batch seq vocab"]:
        """Scores of every token of the vocabulary, float32."""
        head = self.config
        if table is None:
            table = self.param("weight", self.init, (self.rows, self.dim))
        logits = jnp.einsum(
            "bse,ve->bsv",
            final,
            table.astype(final.dtype),
            preferred_element_type=jnp.float32,
        )
        if head.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.rows,))
            logits = logits + bias.astype(jnp.float32)[None, None]
        if head.scale != 1:
            logits = logits * head.scale
        if head.softcap is not None:
            logits = jnp.tanh(logits / head.softcap) * head.softcap
        return logits
