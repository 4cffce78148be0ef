"""ATen matrix products and attention kernels."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dew.bridges.lowering.ops.op import Op
from dew.bridges.lowering.ops.reduce import widen


def _addmm(
    self: Array, mat1: Array, mat2: Array, beta: Any = 1, alpha: Any = 1
) -> Array:
    product = jnp.matmul(mat1, mat2)
    product = product if alpha == 1 else alpha * product
    # Torch promises that beta 0 ignores `self`, NaN and all.
    if beta == 0:
        return product
    return (self if beta == 1 else beta * self) + product


def _einsum(equation: str, tensors: Sequence[Array], path: Any = None) -> Array:
    return jnp.einsum(equation, *tensors)


def _bilinear(
    input1: Array, input2: Array, weight: Array, bias: Array | None = None
) -> Array:
    out = jnp.einsum("...i,oij,...j->...o", input1, weight, input2)
    return out if bias is None else out + bias


def _tensordot(
    self: Array, other: Array, dims_self: Sequence[int], dims_other: Sequence[int]
) -> Array:
    return jnp.tensordot(self, other, axes=(tuple(dims_self), tuple(dims_other)))


def _cosine_similarity(
    x1: Array, x2: Array, dim: int = 1, eps: float | int = 1e-8
) -> Array:
    a, b = widen(x1), widen(x2)
    dot = jnp.sum(a * b, axis=dim)
    norms = jnp.sum(a * a, axis=dim) * jnp.sum(b * b, axis=dim)
    return dot / jnp.sqrt(jnp.maximum(norms, eps**2))


def attention_weights(
    query: Array,
    key: Array,
    *,
    attn_mask: Array | None,
    is_causal: bool,
    scale: float | int | None,
) -> Array:
    """Softmax of the scaled scores, in float32.

    A row that may look nowhere gets weights of 0, as torch's kernels give it.
    """
    scores = jnp.einsum(
        "...qd,...kd->...qk", query, key, preferred_element_type=jnp.float32
    )
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        causal = jnp.tri(query.shape[-2], key.shape[-2], dtype=bool)
        scores = jnp.where(causal, scores, -jnp.inf)
    if attn_mask is not None:
        if attn_mask.dtype == jnp.bool_:
            scores = jnp.where(attn_mask, scores, -jnp.inf)
        else:
            scores = scores + attn_mask
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def attend(weights: Array, query: Array, value: Array) -> Array:
    """Averages the values by `weights`, first rounded to the query's dtype."""
    return jnp.matmul(weights.astype(query.dtype), value)


def repeat_kv_heads(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """Repeats key and value heads until each query head has its own."""
    times = query.shape[-3] // key.shape[-3]
    return jnp.repeat(key, times, axis=-3), jnp.repeat(value, times, axis=-3)


def _grouped_mm(
    self: Array,
    mat2: Array,
    offs: Array | None = None,
    bias: Array | None = None,
    out_dtype: Any = None,
) -> Array:
    """Rows of `self` up to `offs[g]` times matrix g, the groups being consecutive."""
    if offs is None:
        out = jnp.matmul(self, mat2)
    else:
        sizes = jnp.diff(offs, prepend=jnp.zeros((1,), offs.dtype)).astype(jnp.int32)
        out = jax.lax.ragged_dot(self, mat2, sizes)
    return out if bias is None else out + bias


def _grouped_mm_fallback(input: Array, weight: Array, offs: Array) -> Array:
    return _grouped_mm(input, weight, offs)


OPS: dict[str, Op] = {
    "aten.outer.default": jnp.outer,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _addmm,
    "aten.addmv.default": _addmm,
    "aten.addbmm.default": lambda self, batch1, batch2, beta=1, alpha=1: (
        beta * self + alpha * jnp.matmul(batch1, batch2).sum(0)
    ),
    "aten.einsum.default": _einsum,
    "aten.bilinear.default": _bilinear,
    "aten.tensordot.default": _tensordot,
    "aten.cosine_similarity.default": _cosine_similarity,
    "aten._grouped_mm.default": _grouped_mm,
    "aten.grouped_mm.default": _grouped_mm,
    "transformers.grouped_mm_fallback.default": _grouped_mm_fallback,
}
