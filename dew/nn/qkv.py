"""Projections to queries, keys and values, direct or through low-rank vectors.

Functions and not modules, so that their layers are named below the calling attention.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from dew.nn.config import Attention, Norm
from dew.nn.linear import Linear
from dew.nn.norm import Normalization

Rotate = Callable[[Array], Array]
"""Application of the rotary embedding to queries or keys."""

Heads = tuple[
    Float[Array, "batch seq heads dim"],
    Float[Array, "batch seq kv_heads dim"],
    Float[Array, "batch seq kv_heads value_dim"],
]
"""Queries, keys and values of all heads."""


def qkv_heads(
    x: Float[Array, "batch seq embed"], c: Attention, init_std: float, rotate: Rotate
) -> Heads:
    """Returns linear projections of x; queries and keys are normed and rotated."""
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
    q, k = _normalize(q, c, "q_norm"), _normalize(k, c, "k_norm")
    if c.clip is not None:
        q, k, v = (jnp.clip(y, -c.clip, c.clip) for y in (q, k, v))
    return rotate(q), rotate(k), v


def _normalize(
    x: Float[Array, "batch seq heads dim"], c: Attention, name: str
) -> Float[Array, "batch seq heads dim"]:
    if c.qk_norm is None:
        return x
    heads, dim = x.shape[-2:]
    norm, shared_by = c.qk_norm.norm, c.qk_norm.shared_by
    if shared_by == "flat":
        flat = x.reshape(*x.shape[:-2], heads * dim)
        return Normalization(norm, (heads * dim,), name=name)(flat).reshape(x.shape)
    dims = (dim,) if shared_by == "head" else (heads, dim)
    return Normalization(norm, dims, name=name)(x)


def latent_qkv_heads(
    x: Float[Array, "batch seq embed"], c: Attention, init_std: float, rotate: Rotate
) -> Heads:
    """Returns projections through low-rank vectors, with rotated keys shared by heads.

    DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
    """
    latent = c.latent
    assert latent is not None
    embed, fixed = x.shape[-1], c.head_dim - latent.rope_dim

    def linear(name: str, inputs: int, *outputs: int, bias: bool = False) -> Linear:
        return Linear((inputs,), outputs, bias=bias, init_std=init_std, name=name)

    def normalize(y: Array, name: str) -> Array:
        return Normalization(Norm(eps=1e-6), y.shape[-1:], name=name)(y)

    if latent.query_rank is None:
        q = linear("q", embed, c.heads, c.head_dim)(x)
    else:
        low = linear("q_down", embed, latent.query_rank, bias=latent.bias)(x)
        low = normalize(low, "q_norm")
        q = linear("q_up", latent.query_rank, c.heads, c.head_dim)(low)
    low = linear("kv_down", embed, latent.rank + latent.rope_dim, bias=latent.bias)(x)
    low, shared = low[..., : latent.rank], low[..., None, latent.rank :]
    width = fixed + latent.value_dim
    kv = linear("kv_up", latent.rank, c.heads, width)(normalize(low, "kv_norm"))
    k, v = kv[..., :fixed], kv[..., fixed:]
    q = jnp.concatenate([q[..., :fixed], rotate(q[..., fixed:])], axis=-1)
    shared = jnp.broadcast_to(rotate(shared), (*k.shape[:-1], latent.rope_dim))
    return q, jnp.concatenate([k, shared], axis=-1), v
