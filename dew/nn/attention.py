"""Attention: who may look at whom, and the weighted mean of what they see."""

import math
from functools import partial
from typing import no_type_check

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dew.nn.config import Attention
from dew.nn.linear import Linear
from dew.nn.qkv import latent_qkv_heads, qkv_heads

Tables = tuple[Float[Array, "batch seq rot"], Float[Array, "batch seq rot"]]
"""Cosines and sines of every position."""


@no_type_check
@struct.dataclass
class Context:
    """What every block of one forward pass shares.

    `visible` says which key each query may see; its batch axis is 1 where rows agree.
    `distance` is how far back a key lies, and in an encoder how far away. `rotations`
    are the tables of the config's `rope` and `local_rope`. `slot` is where new keys go
    in the cache, None when there is no cache.
    """

    visible: Bool[Array, "rows seq keys"]
    distance: Int[Array, "seq keys"]
    rotations: tuple[Tables | None, Tables | None]
    slot: Int[Array, ""] | None = None


def visible_keys(
    seq: int,
    *,
    causal: bool,
    mask: Bool[Array, "batch seq"] | None,
    segments: Int[Array, "batch seq"] | None,
) -> Bool[Array, "rows seq seq"]:
    """True where a query may see a key: no padding, in its own document.

    And not later than itself where `causal`.
    """
    slots = jnp.arange(seq)
    visible = (slots[None, :] <= slots[:, None])[None]
    visible = visible if causal else jnp.ones_like(visible)
    if mask is not None:
        visible = visible & mask[:, None, :]
    if segments is not None:
        visible = visible & (segments[:, None, :] == segments[:, :, None])
    return visible


def attention_scores(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch keys kv_heads dim"],
    context: Context,
    config: Attention,
    layer: int = 0,
) -> Float[Array, "batch kv_heads group seq keys"]:
    """Scores scale · q kᵀ of a layer, each group of queries over its own keys.

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
    scores = scores * config.scale_of(layer)
    if config.softcap is not None:
        scores = jnp.tanh(scores / config.softcap) * config.softcap
    if config.alibi:
        slopes = jnp.asarray(alibi_slopes(config.heads), jnp.float32)
        slopes = slopes.reshape(1, k.shape[2], -1, 1, 1)
        back = context.distance[None, None, None].astype(jnp.float32)
        scores = scores - slopes * back
    visible, window = context.visible, config.window(layer)
    if window:
        visible = visible & (context.distance < window)[None]
    hidden = jnp.finfo(jnp.float32).min
    return jnp.where(visible[:, None, None], scores, hidden)


def alibi_slopes(heads: int) -> list[float]:
    """How much each head's scores fall with every position back.

    Press et al., "Train Short, Test Long" (2021): a geometric series, and between its
    members where heads are no power of two.
    """
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    between = [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return slopes + between


def attention_weights(
    scores: Float[Array, "batch kv_heads group seq keys"],
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "batch kv_heads group seq keys"]:
    """The softmax over keys, to whose sum a head's sink adds one more."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = sinks.astype(jnp.float32).reshape(1, scores.shape[1], scores.shape[2], 1, 1)
    most = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    most = jax.lax.stop_gradient(most)
    shares = jnp.exp(scores - most)
    return shares / (jnp.sum(shares, axis=-1, keepdims=True) + jnp.exp(sink - most))


JOINED = "b k g s t -> b (k g) s t"
"""Scores [batch, heads, queries, keys], as other models count heads."""


class SelfAttention(nn.Module):
    """One attention layer, with its cache when the collection `cache` holds one."""

    config: Attention
    embed: int
    init_std: float = 0.02
    layer: int = 0

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, *, train: bool
    ) -> Float[Array, "batch seq embed"]:
        """Mixes positions that may see each other."""
        c = self.config
        rope, tables = c.rope_of(self.layer), context.rotations[c.is_local(self.layer)]
        project = qkv_heads if c.latent is None else latent_qkv_heads
        turn = partial(rope.rotate, tables=tables) if rope and tables else lambda y: y
        q, k, v = project(x, c, self.init_std, turn)
        if context.slot is not None:
            k, v = self._remember(k, v, context.slot)
        scores = attention_scores(q, k, context, c, self.layer)
        self._sow_maxima(scores)
        if self.is_mutable_collection("maps") and not self.is_initializing():
            self.put_variable("maps", "scores", (rearrange(scores, JOINED),))
        init = nn.initializers.normal(self.init_std)
        sinks = self.param("sinks", init, (c.heads,)) if c.sinks else None
        weights = attention_weights(scores, sinks)
        weights = nn.Dropout(c.dropout, deterministic=not train)(weights)
        mixed = jnp.einsum("bkgst,btkd->bskgd", weights.astype(v.dtype), v)
        mixed = rearrange(mixed, "b s k g d -> b s (k g) d")
        return Linear(
            (c.heads, c.value_dim),
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
        v: Float[Array, "batch seq kv_heads value_dim"],
        slot: Int[Array, ""],
    ) -> tuple[
        Float[Array, "batch keys kv_heads dim"],
        Float[Array, "batch keys kv_heads value_dim"],
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
