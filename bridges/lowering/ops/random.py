"""Ops that draw: each takes a key, `rng`, beside what its schema takes."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dew.bridges.lowering.ops.matmul import (
    attend,
    attention_weights,
    repeat_kv_heads,
)
from dew.bridges.lowering.ops.op import Op


def drop(x: Array, p: float | int, rng: Array) -> Array:
    """Zeroes each element with chance `p` and scales the rest by 1 / (1 - p)."""
    if p >= 1:
        return jnp.zeros_like(x)
    keep = jax.random.bernoulli(rng, 1 - p, x.shape)
    return jnp.where(keep, x / (1 - p), jnp.zeros((), x.dtype))


def _dropout(
    input: Array, p: float | int, train: bool, rng: Array | None = None
) -> Array:
    return drop(input, p, rng) if train and rng is not None and p else input


def _native_dropout(
    input: Array, p: float | int, train: bool | None, rng: Array | None = None
) -> tuple[Array, Array]:
    """Returns the kept and scaled elements, and which were kept."""
    if not train or rng is None or not p:
        return input, jnp.ones(input.shape, bool)
    kept = drop(jnp.ones(input.shape, jnp.float32), p, rng) != 0
    return jnp.where(kept, input / (1 - p), jnp.zeros((), input.dtype)), kept


def _feature_dropout(
    input: Array, p: float | int, train: bool, rng: Array | None = None
) -> Array:
    if not train or rng is None or not p:
        return input
    mask = drop(jnp.ones(input.shape[:2], input.dtype), p, rng)
    return input * mask.reshape(mask.shape + (1,) * (input.ndim - 2))


def _attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float | int = 0.0,
    is_causal: bool = False,
    scale: float | int | None = None,
    enable_gqa: bool = False,
    rng: Array | None = None,
) -> Array:
    """Scaled dot-product attention, with the weights dropped where torch drops them."""
    if enable_gqa:
        key, value = repeat_kv_heads(query, key, value)
    weights = attention_weights(
        query, key, attn_mask=attn_mask, is_causal=is_causal, scale=scale
    )
    if dropout_p and rng is not None:
        weights = drop(weights, dropout_p, rng)
    return attend(weights, query, value)


def _require_key(rng: Array | None, op: str) -> Array:
    if rng is None:
        raise ValueError(
            f"{op} draws random numbers, and no key was given; pass rngs={{'dropout': "
            "jax.random.key(…)}"
        )
    return rng


def _rand(size: Sequence[int], dtype: Any = None, rng: Array | None = None) -> Array:
    return jax.random.uniform(_require_key(rng, "rand"), tuple(size))


def _randn(size: Sequence[int], dtype: Any = None, rng: Array | None = None) -> Array:
    return jax.random.normal(_require_key(rng, "randn"), tuple(size))


def _rand_like(self: Array, dtype: Any = None, rng: Array | None = None) -> Array:
    return jax.random.uniform(_require_key(rng, "rand_like"), self.shape)


def _randn_like(self: Array, dtype: Any = None, rng: Array | None = None) -> Array:
    return jax.random.normal(_require_key(rng, "randn_like"), self.shape)


def _bernoulli_p(self: Array, p: Any = 0.5, rng: Array | None = None) -> Array:
    return jax.random.bernoulli(_require_key(rng, "bernoulli"), p, self.shape)


def _uniform(
    self: Array, low: float | int = 0, high: float | int = 1, rng: Array | None = None
) -> Array:
    unit = jax.random.uniform(_require_key(rng, "uniform"), self.shape)
    return low + (high - low) * unit


def _randint(
    low: int,
    high: int,
    size: Sequence[int],
    dtype: Any = None,
    rng: Array | None = None,
) -> Array:
    return jax.random.randint(_require_key(rng, "randint"), tuple(size), low, high)


def _randperm(n: int, dtype: Any = None, rng: Array | None = None) -> Array:
    return jax.random.permutation(_require_key(rng, "randperm"), n)


_DRAWN_BY_TORCH2JAX = ("aten.bernoulli.default",)


def is_random(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Says whether this call of an overload draws: dropout off is no draw."""
    match name:
        case (
            "aten.dropout.default"
            | "aten.feature_dropout.default"
            | "aten.native_dropout.default"
        ):
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            train = kwargs.get("train", args[2] if len(args) > 2 else True)
            return bool(train) and not math.isclose(p, 0)
        case "aten.scaled_dot_product_attention.default":
            return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0))
        case (
            "aten.lstm.input"
            | "aten.gru.input"
            | "aten.rnn_tanh.input"
            | "aten.rnn_relu.input"
        ):
            # input, hx, params, has_biases, num_layers, dropout, train, …
            _, _, _, _, layers, dropout, train, *_ = args
            return bool(train) and layers > 1 and not math.isclose(dropout, 0)
        case _:
            return name in OPS or name in _DRAWN_BY_TORCH2JAX


OPS: dict[str, Op] = {
    "aten.dropout.default": _dropout,
    "aten.feature_dropout.default": _feature_dropout,
    "aten.native_dropout.default": _native_dropout,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.rand.default": _rand,
    "aten.randn.default": _randn,
    "aten.rand_like.default": _rand_like,
    "aten.randn_like.default": _randn_like,
    "aten.bernoulli.p": _bernoulli_p,
    "aten.uniform.default": _uniform,
    "aten.randint.low": _randint,
    "aten.randint.default": lambda high, size, dtype=None, rng=None: _randint(
        0, high, size, dtype, rng
    ),
    "aten.randperm.default": _randperm,
}
