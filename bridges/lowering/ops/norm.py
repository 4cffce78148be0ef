"""Normalisations; statistics are taken in float32 at least, as torch takes them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from dew.bridges.lowering.ops.op import Op
from dew.bridges.lowering.ops.reduce import widen


def _standardise(x: Array, axes: tuple[int, ...], eps: float | int) -> Array:
    mean = jnp.mean(x, axis=axes, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + eps)


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(
    input: Array,
    normalized_shape: Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float | int = 1e-5,
    cudnn_enable: bool = True,
) -> Array:
    axes = tuple(range(-len(normalized_shape), 0))
    return _affine(_standardise(widen(input), axes, eps), weight, bias)


def _rms_norm(
    input: Array,
    normalized_shape: Sequence[int],
    weight: Array | None = None,
    eps: float | int | None = None,
) -> Array:
    axes = tuple(range(-len(normalized_shape), 0))
    x = widen(input)
    eps = float(jnp.finfo(input.dtype).eps) if eps is None else eps
    power = jnp.mean(jnp.square(x), axis=axes, keepdims=True)
    return _affine(x * jax.lax.rsqrt(power + eps), weight, None)


def _on_axis_1(value: Array, ndim: int) -> Array:
    return value.reshape((1, -1) + (1,) * (ndim - 2))


def _per_channel(value: Array | None, ndim: int) -> Array | None:
    return None if value is None else _on_axis_1(value, ndim)


def _channel_affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    return _affine(x, _per_channel(weight, x.ndim), _per_channel(bias, x.ndim))


def _group_norm(
    input: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float | int = 1e-5,
    cudnn_enabled: bool = True,
) -> Array:
    grouped = widen(input).reshape(input.shape[0], num_groups, -1)
    out = _standardise(grouped, (-1,), eps).reshape(input.shape)
    return _affine(
        out, _per_channel(weight, input.ndim), _per_channel(bias, input.ndim)
    )


def _native_group_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float | int,
) -> tuple[Array, Array, Array]:
    x = widen(input).reshape(N, group, -1)
    mean = x.mean(-1)
    rstd = jax.lax.rsqrt(x.var(-1) + eps)
    return _group_norm(input, group, weight, bias, eps), mean, rstd


def _native_layer_norm(
    input: Array,
    normalized_shape: Sequence[int],
    weight: Array | None,
    bias: Array | None,
    eps: float | int,
) -> tuple[Array, Array, Array]:
    axes = tuple(range(-len(normalized_shape), 0))
    x = widen(input)
    mean = x.mean(axes, keepdims=True)
    rstd = jax.lax.rsqrt(x.var(axes, keepdims=True) + eps)
    return _layer_norm(input, normalized_shape, weight, bias, eps), mean, rstd


def _statistics(x: Array) -> tuple[Array, Array]:
    axes = (0, *range(2, x.ndim))
    return x.mean(axes), x.var(axes)


def _batch_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float | int,
    eps: float | int,
    cudnn_enabled: bool = True,
) -> Array:
    x = widen(input)
    if training or running_mean is None or running_var is None:
        mean, var = _statistics(x)
    else:
        mean, var = running_mean, running_var
    rstd = jax.lax.rsqrt(widen(var) + eps)
    out = (x - _on_axis_1(mean, x.ndim)) * _on_axis_1(rstd, x.ndim)
    return _channel_affine(out, weight, bias)


def _batch_norm_functional(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: float | int,
    eps: float | int,
) -> tuple[Array, Array, Array, Array, Array]:
    """Batch norm that also returns the moved statistics, the variance unbiased."""
    x = widen(input)
    out = _batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )
    mean, var = _statistics(x)
    if not training:
        empty = jnp.zeros((0,), x.dtype)
        return out, empty, empty, running_mean, running_var
    count = x.size // x.shape[1]
    moved_mean = (1 - momentum) * running_mean + momentum * mean
    unbiased = var * count / max(count - 1, 1)
    moved_var = (1 - momentum) * running_var + momentum * unbiased
    return out, mean, jax.lax.rsqrt(var + eps), moved_mean, moved_var


def _batch_norm_no_training(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    momentum: float | int,
    eps: float | int,
) -> tuple[Array, Array, Array]:
    empty = jnp.zeros((0,), jnp.float32)
    out = _batch_norm(
        input, weight, bias, running_mean, running_var, False, momentum, eps
    )
    return out, empty, empty


def _instance_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    use_input_stats: bool,
    momentum: float | int,
    eps: float | int,
    cudnn_enabled: bool = True,
) -> Array:
    if not use_input_stats:
        return _batch_norm(
            input, weight, bias, running_mean, running_var, False, momentum, eps
        )
    out = _standardise(widen(input), tuple(range(2, input.ndim)), eps)
    return _affine(
        out, _per_channel(weight, input.ndim), _per_channel(bias, input.ndim)
    )


def _weight_norm(v: Array, g: Array, dim: int = 0) -> Array:
    """Gives each slice of `v` along `dim` the length that `g` says."""
    axes = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
    return v * (g / jnp.sqrt(jnp.sum(jnp.square(widen(v)), axis=axes, keepdims=True)))


def _weight_norm_interface(v: Array, g: Array, dim: int = 0) -> tuple[Array, Array]:
    axes = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
    norms = jnp.sqrt(jnp.sum(jnp.square(widen(v)), axis=axes, keepdims=True))
    return _weight_norm(v, g, dim), norms


OPS: dict[str, Op] = {
    "aten._weight_norm.default": _weight_norm,
    "aten._weight_norm_interface.default": _weight_norm_interface,
    "aten.layer_norm.default": _layer_norm,
    "aten.native_layer_norm.default": _native_layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.group_norm.default": _group_norm,
    "aten.native_group_norm.default": _native_group_norm,
    "aten.batch_norm.default": _batch_norm,
    "aten._native_batch_norm_legit_functional.default": _batch_norm_functional,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_no_training,
    "aten.instance_norm.default": _instance_norm,
}
