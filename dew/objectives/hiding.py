"""Which positions count, and which of them a self-supervised objective hides."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dew.typing import Batch

IGNORED = -100
"""The label of a position that is not predicted, as torch has it."""


def real_tokens(batch: Batch) -> Bool[Array, "batch seq"]:
    """True for the tokens of a text, false for padding."""
    real = jnp.ones(batch["tokens"].shape, bool)
    if "mask" in batch:
        real = batch["mask"].astype(bool)
    if "segment_ids" in batch:
        real &= batch["segment_ids"] != 0
    return real


def hide_tokens(
    tokens: Int[Array, "batch seq"],
    free: Bool[Array, "batch seq"],
    key: Array,
    *,
    rate: float,
    mask_id: int,
    vocab: int,
) -> tuple[Int[Array, "batch seq"], Int[Array, "batch seq"]]:
    """Tokens with `rate` of the free ones hidden, and those as labels.

    Of the hidden ones 80 in 100 become `mask_id`, 10 a random token, and 10 stay:
    Devlin et al., "BERT" (2019), section 3.1.
    """
    keys = jax.random.split(key, 3)
    hidden = free & jax.random.bernoulli(keys[0], rate, tokens.shape)
    fate = jax.random.uniform(keys[1], tokens.shape)
    other = jax.random.randint(keys[2], tokens.shape, 0, vocab, tokens.dtype)
    replaced = jnp.where(fate < 0.9, other, tokens)
    replaced = jnp.where(fate < 0.8, jnp.full_like(tokens, mask_id), replaced)
    labels = jnp.where(hidden, tokens, jnp.full_like(tokens, IGNORED))
    return jnp.where(hidden, replaced, tokens), labels


def hide_spans(key: Array, rows: int, seq: int, width: int) -> Bool[Array, "rows seq"]:
    """True on one span of `width` positions in each row."""
    start = jax.random.randint(key, (rows, 1), 0, seq - width + 1)
    place = jnp.arange(seq)[None]
    return (place >= start) & (place < start + width)
