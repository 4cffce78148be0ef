"""Refusing positions that a table of learned ones has no row for.

Under `jax.jit` values are not there to be looked at: positions that a caller states are
then not checked, and one past the table makes the row's outputs NaN.
"""

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from dew.nn.config import Embedding


def check_length(config: Embedding, length: int) -> None:
    """Checks that positions 0 to `length` - 1 have rows.

    Raises:
        ValueError: the table is shorter.
    """
    if config.positions and length > config.positions:
        raise ValueError(
            f"a text of {length} tokens needs {length} learned positions, and the "
            f"table has {config.positions} rows; shorten or split the text, or give "
            "positions that begin anew"
        )


def check_positions(config: Embedding, positions: Int[Array, "batch seq"]) -> None:
    """Checks that stated positions have rows, where their values can be seen.

    Raises:
        ValueError: one has none.
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
    """The rows of those numbers, NaN where there is none; numbers never wrap around."""
    return table.at[numbers].get(
        mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
    )
