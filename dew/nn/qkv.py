"""Queries, keys and values of every head, straight or through a latent vector.

Functions, not modules: the layers they make are children of the attention that calls.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from dew.nn.config import Attention, Norm
from dew.nn.linear import Linear
from dew.nn.norm import Normalization

Turn = Callable[[Array], Array]
"""Applies the rotary embedding."""

Heads = tuple[
    Float[Array, "batch seq heads dim"],
    Float[Array, "batch seq kv_heads dim"],
    Float[Array, "batch seq kv_heads value_dim"],
]
"""Queries, keys and values."""


def qkv_heads(
    x: Float[Array, "batch seq embed"], c: Attention, init_std: float, turn: Turn
) -> Heads:
    """Queries, keys and values as linear maps of x; the first two normed and turned."""
    q, k, v = (
        Linear(
            (x.shape[-1],),
            (heads, c.head_dim),
            bias=c.qkv_bias,
            init_std=init_std,
            name=name,
        )(x)
        for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))
    )
    q, k = _normed(q, c, "q_norm"), _normed(k, c, "k_norm")
    if c.clip is not None:
        q, k, v = (jnp.clip(y, -c.clip, c.clip) for y in (q, k, v))
    return turn(q), turn(k), v


def _normed(
    x: Float[Array, "batch seq heads dim"], c: Attention, name: str
) -> Float[Array, "batch seq heads dim"]:
    if c.qk_norm is None:
        return x
    heads, dim = x.shape[-2:]
    norm, over = c.qk_norm.norm, c.qk_norm.shared_by
    if over == "flat":
        flat = x.reshape(*x.shape[:-2], heads * dim)
        return Normalization(norm, (heads * dim,), name=name)(flat).reshape(x.shape)
    dims = (dim,) if over == "head" else (heads, dim)
    return Normalization(norm, dims, name=name)(x)


def latent_qkv_heads(
    x: Float[Array, "batch seq embed"], c: Attention, init_std: float, turn: Turn
) -> Heads:
    """Queries, keys and values through low ranks, part of each key shared by heads.

    DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
    """
    latent = c.latent
    assert latent is not None
    embed, fixed = x.shape[-1], c.head_dim - latent.rope_dim

    def linear(name: str, inputs: int, *outputs: int, bias: bool = False) -> Linear:
        return Linear((inputs,), outputs, bias=bias, init_std=init_std, name=name)

    def normed(y: Array, name: str) -> Array:
        return Normalization(Norm(eps=1e-6), y.shape[-1:], name=name)(y)

    if latent.query_rank is None:
        q = linear("q", embed, c.heads, c.head_dim)(x)
    else:
        low = linear("q_down", embed, latent.query_rank, bias=latent.bias)(x)
        low = normed(low, "q_norm")
        q = linear("q_up", latent.query_rank, c.heads, c.head_dim)(low)
    low = linear("kv_down", embed, latent.rank + latent.rope_dim, bias=latent.bias)(x)
    low, shared = low[..., : latent.rank], low[..., None, latent.rank :]
    width = fixed + latent.value_dim
    kv = linear("kv_up", latent.rank, c.heads, width)(normed(low, "kv_norm"))
    k, v = kv[..., :fixed], kv[..., fixed:]
    q = jnp.concatenate([q[..., :fixed], turn(q[..., fixed:])], axis=-1)
    shared = jnp.broadcast_to(turn(shared), (*k.shape[:-1], latent.rope_dim))
    return q, jnp.concatenate([k, shared], axis=-1), v
