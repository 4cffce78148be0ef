"""Grouped-query attention with masks, windows, ALiBi, sinks and a key/value cache."""

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
"""Cosines and sines of the rotary embedding at every position."""

SCORE_COLLECTIONS = ("qk", "maps")
"""Collections that receive attention scores or their maxima, where mutable."""


@no_type_check
@struct.dataclass
class Context:
    """Masks, distances and rotary tables shared by all blocks of one forward pass.

    `visible` is the attention mask: true where a query may attend to a key; its first
    axis is 1 where all rows have the same mask. `distance` is the query's index minus
    the key's, and its absolute value in an encoder. `rotations` holds the tables of
    the config's `rope` and `local_rope`. `slot` is the index in the cache at which new
    keys are written; None without a cache.
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
    """Returns the attention mask: true where a query may attend to a key.

    Excluded are padding keys, where `mask` is false, keys of other documents of a
    packed row, and later keys where `causal`.
    """
    slots = jnp.arange(seq)
    # The batch axis stays 1 until a row differs: one mask for all rows of a batch.
    visible = (slots[None, :] <= slots[:, None])[None]
    visible = visible if causal else jnp.ones_like(visible)
    # Keys alone are masked, not queries: a padding query's output is read by nobody,
    # and a row without any visible key would be softmax over nothing.
    if mask is not None:
        visible = visible & mask[:, None, :]
    if segments is not None:
        visible = visible & (segments[:, None, :] == segments[:, :, None])
    return visible


def layer_mask(
    context: Context, config: Attention, layer: int
) -> Bool[Array, "rows seq keys"]:
    """Returns the attention mask of one layer, narrowed to its sliding window."""
    window = config.window(layer)
    if not window:
        return context.visible
    return context.visible & (context.distance < window)[None]


def alibi_bias(context: Context, heads: int) -> Float[Array, "1 heads seq keys"]:
    """Returns what ALiBi adds to scores: minus slope times distance, float32."""
    slopes = jnp.asarray(alibi_slopes(heads), jnp.float32).reshape(1, heads, 1, 1)
    return -slopes * context.distance[None, None].astype(jnp.float32)


def alibi_slopes(heads: int) -> list[float]:
    """Returns the decrease of each head's scores per position of distance.

    Press et al., "Train Short, Test Long" (2021): a geometric series, with members of
    the next finer one added where the number of heads is not a power of two.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return slopes + between


def attention_scores(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch keys kv_heads dim"],
    context: Context,
    config: Attention,
    layer: int = 0,
) -> Float[Array, "batch kv_heads group seq keys"]:
    """Returns masked scores scale · q kᵀ, each group of queries over its own keys.

    Float32 in every dtype of q and k.
    """
    groups = rearrange(q, "b s (k g) d -> b s k g d", k=k.shape[2])
    # Products of bfloat16 are accumulated and kept in float32: softmax takes
    # differences of scores, whose rounding would be that of the largest one.
    scores = jnp.einsum(
        "b s k g d, b t k d -> b k g s t",
        groups,
        k,
        preferred_element_type=jnp.float32,
    )
    scores = scores * config.scale_of(layer)
    # The cap comes before bias and mask, as in Gemma 2: after them tanh would make
    # masked scores finite again.
    if config.softcap is not None:
        scores = jnp.tanh(scores / config.softcap) * config.softcap
    if config.alibi:
        bias = alibi_bias(context, config.heads)
        scores = scores + rearrange(bias, "b (k g) s t -> b k g s t", k=k.shape[2])
    # The least float32 and not -inf: a query without visible keys, which only padding
    # has, then gets equal weights instead of NaN, whose gradient would spread.
    mask = layer_mask(context, config, layer)[:, None, None]
    return jnp.where(mask, scores, jnp.finfo(jnp.float32).min)


def attention_weights(
    scores: Float[Array, "batch kv_heads group seq keys"],
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "batch kv_heads group seq keys"]:
    """Returns the softmax of scores over keys, and over each head's sink if given.

    A sink is one more score in the softmax's sum, with no value of its own: weights
    over keys then sum to less than 1.
    """
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = sinks.astype(jnp.float32).reshape(1, scores.shape[1], scores.shape[2], 1, 1)
    # Softmax does not depend on the subtracted maximum, so no gradient goes through it.
    most = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    most = jax.lax.stop_gradient(most)
    shares = jnp.exp(scores - most)
    return shares / (jnp.sum(shares, axis=-1, keepdims=True) + jnp.exp(sink - most))


JOINED = "b k g s t -> b (k g) s t"
"""Scores as [batch, heads, queries, keys], the layout of other models' maps."""


class SelfAttention(nn.Module):
    """Multi-head self-attention layer, cached where the collection `cache` is given.

    Scores, their maxima and dropout of weights exist only on a path that computes
    scores; all other layers run `jax.nn.dot_product_attention`.
    """

    config: Attention
    embed: int
    init_std: float = 0.02
    layer: int = 0

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, *, train: bool
    ) -> Float[Array, "batch seq embed"]:
        """Returns the projected attention output of every position."""
        c = self.config
        rope, tables = c.rope_of(self.layer), context.rotations[c.is_local(self.layer)]
        project = qkv_heads if c.latent is None else latent_qkv_heads
        rotate = partial(rope.rotate, tables=tables) if rope and tables else lambda y: y
        q, k, v = project(x, c, self.init_std, rotate)
        if context.slot is not None:
            k, v = self._update_cache(k, v, context.slot)
        mix = self._mix_by_scores if self._needs_scores(q.dtype, train) else self._mix
        return Linear(
            (c.heads, c.value_dim),
            (self.embed,),
            bias=c.out_bias,
            init_std=self.init_std,
            name="o",
        )(mix(q, k, v, context, train))

    def _needs_scores(self, dtype: jnp.dtype, train: bool) -> bool:
        """Whether this layer uses scores in a way that jax's attention does not offer.

        Those are a cap, sinks, dropout of weights, values of another width than keys,
        and a caller that collects scores. In half precision the gradient of jax's
        function mixes dtypes, which strict promotion refuses.
        """
        c = self.config
        return (
            dtype.itemsize < 4
            or c.softcap is not None
            or c.sinks
            or c.value_dim != c.head_dim
            or (train and c.dropout > 0)
            or any(self._is_collecting(name) for name in SCORE_COLLECTIONS)
        )

    def _mix(
        self,
        q: Float[Array, "batch seq heads dim"],
        k: Float[Array, "batch keys kv_heads dim"],
        v: Float[Array, "batch keys kv_heads dim"],
        context: Context,
        train: bool,
    ) -> Float[Array, "batch seq heads dim"]:
        """Returns the weighted mean of values for each query, by jax's attention."""
        # Equal to the path below within rounding, and as exact (9 heads of 64 on a CPU:
        # both 7e-7 from float64). Measured on one core at 1024 tokens: 0.7 of its time
        # forward and 0.6 with gradients; at 128 tokens 0.9 and 1.0.
        c = self.config
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias=alibi_bias(context, c.heads) if c.alibi else None,
            mask=layer_mask(context, c, self.layer)[:, None],
            scale=c.scale_of(self.layer),
        )

    def _mix_by_scores(
        self,
        q: Float[Array, "batch seq heads dim"],
        k: Float[Array, "batch keys kv_heads dim"],
        v: Float[Array, "batch keys kv_heads value_dim"],
        context: Context,
        train: bool,
    ) -> Float[Array, "batch seq heads value_dim"]:
        """Returns the weighted mean of values for each query, from scores kept whole.

        Scores go to `maps`, and each head's largest score [rows, heads] to `qk`, where
        those collections are mutable: as one-tuples, as flax sows them, new in each
        pass.
        """
        c = self.config
        scores = attention_scores(q, k, context, c, self.layer)
        if self._is_collecting("qk"):
            maxima = rearrange(jnp.max(scores, axis=(3, 4)), "b k g -> b (k g)")
            self.put_variable("qk", "max_logits", (jax.lax.stop_gradient(maxima),))
        if self._is_collecting("maps"):
            self.put_variable("maps", "scores", (rearrange(scores, JOINED),))
        init = nn.initializers.normal(self.init_std)
        sinks = self.param("sinks", init, (c.heads,)) if c.sinks else None
        weights = attention_weights(scores, sinks)
        weights = nn.Dropout(c.dropout, deterministic=not train)(weights)
        mixed = jnp.einsum("bkgst,btkd->bskgd", weights.astype(v.dtype), v)
        return rearrange(mixed, "b s k g d -> b s (k g) d")

    def _is_collecting(self, collection: str) -> bool:
        return self.is_mutable_collection(collection) and not self.is_initializing()

    def _update_cache(
        self,
        k: Float[Array, "batch seq kv_heads dim"],
        v: Float[Array, "batch seq kv_heads value_dim"],
        slot: Int[Array, ""],
    ) -> tuple[
        Float[Array, "batch keys kv_heads dim"],
        Float[Array, "batch keys kv_heads value_dim"],
    ]:
        """Writes new keys and values at `slot`; returns all cached keys and values."""
        updated = []
        for name, new in (("k", k), ("v", v)):
            cached = self.get_variable("cache", name)
            cached = jax.lax.dynamic_update_slice(
                cached, new.astype(cached.dtype), (0, slot, 0, 0)
            )
            self.put_variable("cache", name, cached)
            updated.append(cached.astype(new.dtype))
        return updated[0], updated[1]
