"""Token embeddings, learned positions, and the output projection to logits."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from dew.nn.config import Embedding, Head


class TokenEmbedding(nn.Module):
    """Embedding table with one row of `dim` numbers for each of `rows` tokens."""

    rows: int
    dim: int
    init: Any

    @nn.compact
    def __call__(self) -> Float[Array, "rows dim"]:
        """Returns the whole table; callers index its rows."""
        return self.param("weight", self.init, (self.rows, self.dim))


class Unembedding(nn.Module):
    """Projection of hidden states to logits, by a table of its own or a given one."""

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
        """Returns the logits of every token of the vocabulary, float32."""
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


def check_length(config: Embedding, length: int) -> None:
    """Checks that the table of learned positions has at least `length` rows.

    Raises:
        ValueError: the table has fewer rows.
    """
    if config.positions and length > config.positions:
        raise ValueError(
            f"a text of {length} tokens needs {length} learned positions, and the "
            f"table has {config.positions} rows; shorten or split the text, or give "
            "positions that start again from 0"
        )


def check_positions(config: Embedding, positions: Int[Array, "batch seq"]) -> None:
    """Checks that given positions have rows in the table, outside of compiled calls.

    Raises:
        ValueError: a position has no row.
    """
    if not config.positions or isinstance(positions, Tracer):
        return
    first, last = int(jnp.min(positions)), int(jnp.max(positions))
    if first < -config.offset or last >= config.positions:
        raise ValueError(
            f"positions must lie in [{-config.offset}, {config.positions}) because the "
            f"table of learned positions has {config.positions} rows, got {first} to "
            f"{last}"
        )


def learned_rows(
    table: Float[Array, "rows dim"], numbers: Int[Array, "batch seq"]
) -> Float[Array, "batch seq dim"]:
    """Returns the table's rows of those indices, NaN for indices without a row.

    Negative indices do not wrap around.
    """
    return table.at[numbers].get(
        mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
    )
