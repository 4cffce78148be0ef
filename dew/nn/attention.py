"""Attention: who may look at whom, and the weighted mean of what they see."""

from typing import no_type_check

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dew.nn.config import Attention
from dew.nn.layers import Linear


@no_type_check
@struct.dataclass
class Context:
    """What every block of one forward pass shares.

    `visible` says which key each query may see; its batch axis is 1 where rows agree.
    `slot` is where new keys go in the cache, None when there is no cache.
    """

    visible: Bool[Array, "rows seq keys"]
    rotation: tuple[Float[Array, "batch seq rot"], Float[Array, "batch seq rot"]]
    slot: Int[Array, ""] | None = None


def visible_keys(
    seq: int,
    *,
    mask: Bool[Array, "batch seq"] | None,
    segments: Int[Array, "batch seq"] | None,
) -> Bool[Array, "rows seq seq"]:
    """True where a query may see a key: not later, not padding, in its own document."""
    slots = jnp.arange(seq)
    visible = (slots[None, :] <= slots[:, None])[None]
    if mask is not None:
        visible = visible & mask[:, None, :]
    if segments is not None:
        visible = visible & (segments[:, None, :] == segments[:, :, None])
    return visible


def attention_scores(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch keys kv_heads dim"],
    visible: Bool[Array, "rows seq keys"],
    *,
    scale: float,
) -> Float[Array, "batch kv_heads group seq keys"]:
    """Scores scale · q kᵀ, each group of queries over its own keys.

    Float32 whatever the dtype, and its least number where a query may not see a key: a
    query that sees none, which only padding does, sees all of them alike and not NaN.
    """
    groups = rearrange(q, "b s (k g) d -> b s k g d", k=k.shape[2])
    scores = jnp.einsum(
        "b s k g d, b t k d -> b k g s t",
        groups,
        k,
        preferred_element_type=jnp.float32,
    )
    hidden = jnp.finfo(jnp.float32).min
    return jnp.where(visible[:, None, None], scores * scale, hidden)


class SelfAttention(nn.Module):
    """One attention layer, with its cache when the collection `cache` holds one."""

    config: Attention
    embed: int
    init_std: float = 0.02

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, *, train: bool
    ) -> Float[Array, "batch seq embed"]:
        """Mixes positions that may see each other."""
        c = self.config
        q, k, v = (
            Linear(
                (self.embed,),
                (heads, c.head_dim),
                bias=c.qkv_bias,
                init_std=self.init_std,
                name=name,
            )(x)
            for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))
        )
        q = c.rope.rotate(q, context.rotation)
        k = c.rope.rotate(k, context.rotation)
        if context.slot is not None:
            k, v = self._remember(k, v, context.slot)
        scale = c.head_dim**-0.5 if c.scale is None else c.scale
        scores = attention_scores(q, k, context.visible, scale=scale)
        self._sow_maxima(scores)
        weights = jax.nn.softmax(scores, axis=-1)
        weights = nn.Dropout(c.dropout, deterministic=not train)(weights)
        mixed = jnp.einsum("bkgst,btkd->bskgd", weights.astype(v.dtype), v)
        mixed = rearrange(mixed, "b s k g d -> b s (k g) d")
        return Linear(
            (c.heads, c.head_dim),
            (self.embed,),
            bias=c.out_bias,
            init_std=self.init_std,
            name="o",
        )(mixed)

    def _sow_maxima(
        self, scores: Float[Array, "batch kv_heads group seq keys"]
    ) -> None:
        """Leaves each head's largest score, [rows, heads], where `qk` is open.

        A one-tuple as flax sows it, made anew by each pass.
        """
        if self.is_mutable_collection("qk") and not self.is_initializing():
            maxima = rearrange(jnp.max(scores, axis=(3, 4)), "b k g -> b (k g)")
            self.put_variable("qk", "max_logits", (jax.lax.stop_gradient(maxima),))

    def _remember(
        self,
        k: Float[Array, "batch seq kv_heads dim"],
        v: Float[Array, "batch seq kv_heads dim"],
        slot: Int[Array, ""],
    ) -> tuple[
        Float[Array, "batch keys kv_heads dim"], Float[Array, "batch keys kv_heads dim"]
    ]:
        """Writes new keys and values at `slot` and returns all that are remembered."""
        whole = []
        for name, new in (("k", k), ("v", v)):
            kept = self.get_variable("cache", name)
            kept = jax.lax.dynamic_update_slice(
                kept, new.astype(kept.dtype), (0, slot, 0, 0)
            )
            self.put_variable("cache", name, kept)
            whole.append(kept.astype(new.dtype))
        return whole[0], whole[1]
