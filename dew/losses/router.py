"""Load-balancing loss of mixture-of-experts routers, from additive sums over tokens.

Fedus et al., "Switch Transformers" (2021), equations 4 to 6, over all layers together
and `top_k` experts a token, as transformers computes it.
"""

from collections.abc import Iterable
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float


@no_type_check
@struct.dataclass
class RouterSums:
    """Sums over the real tokens of all routers: they add over batches.

    `picks` counts the selections of each expert, and `probabilities` sums its softmax
    probabilities, both [experts]; `tokens` counts tokens, once for each router.
    """

    picks: Float[Array, " experts"]
    probabilities: Float[Array, " experts"]
    tokens: Float[Array, ""]


def router_sums(
    logits: Iterable[Float[Array, "*layers batch seq experts"]],
    real: Bool[Array, "batch seq"],
    *,
    top_k: int,
) -> RouterSums:
    """Returns the sums of routers' logits; positions that are not `real` count nothing.

    Args:
        logits: of each router, or of several stacked along a first axis.
        real: positions that hold a token.
        top_k: number of experts selected for each token.
    """
    weights = real.astype(jnp.float32)
    picks, probabilities, tokens = [], [], []
    for stacked in logits:
        scores = jax.nn.softmax(
            jnp.where(real[..., None], stacked.astype(jnp.float32), 0), axis=-1
        )
        experts = scores.shape[-1]
        _, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores), top_k)
        selected = jnp.sum(jax.nn.one_hot(chosen, experts), axis=-2)
        flat = [x.reshape(-1, *weights.shape, experts) for x in (selected, scores)]
        sums = [jnp.einsum("lbse,bs->e", x, weights) for x in flat]
        picks.append(sums[0])
        probabilities.append(sums[1])
        tokens.append(flat[0].shape[0] * jnp.sum(weights))
    return RouterSums(
        *(jnp.sum(jnp.stack(x), 0) for x in (picks, probabilities, tokens))
    )


def load_balancing_loss(sums: RouterSums) -> Float[Array, ""]:
    """Returns Σ f·P times the number of experts; 0 where no token was routed.

    f is the share of tokens that selected an expert and P its mean probability. It is
    `top_k` where all experts are selected equally.

    >>> even = jnp.asarray([4.0, 4.0])
    >>> float(load_balancing_loss(RouterSums(even, even, jnp.float32(8))))
    1.0
    """
    tokens = jnp.maximum(sums.tokens, 1)
    shares, means = sums.picks / tokens, sums.probabilities / tokens
    return len(sums.picks) * jnp.sum(shares * means)
