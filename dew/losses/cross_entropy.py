"""Cross-entropy of tokens, and the next-token labels of a sequence."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dew.tree import widen


def next_token_losses(
    logits: Float[Array, "batch seq vocab"], tokens: Int[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """-log softmax(logits) of the following token, float32; the last position is 0."""
    return token_losses(logits, next_tokens(tokens)).at[:, -1].set(0)


def next_tokens(tokens: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Each position's following token; the first of the row for the last."""
    return jnp.roll(tokens, -1, axis=1)


def token_losses(
    logits: Float[Array, "batch seq vocab"], labels: Int[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """-log softmax(logits) of the labels, float32 or wider."""
    logits = widen(logits)
    chosen = jnp.take_along_axis(logits, labels[:, :, None], axis=-1)[:, :, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
