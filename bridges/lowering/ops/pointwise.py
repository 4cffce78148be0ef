"""Elementwise ops: arithmetic, comparisons, logic, activations."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy import special

from dew.bridges.lowering.ops.op import Op


def absolute(x: Array) -> Array:
    """Absolute value whose gradient at 0 is 0, as in torch, and not 1 as in jax."""
    return jnp.abs(jnp.where(x == 0, jax.lax.stop_gradient(x), x))


def _add(self: Any, other: Any, alpha: Any = 1) -> Array:
    return jnp.add(self, other if alpha == 1 else other * alpha)


def _sub(self: Any, other: Any, alpha: Any = 1) -> Array:
    return jnp.subtract(self, other if alpha == 1 else other * alpha)


def _rsub(self: Any, other: Any, alpha: Any = 1) -> Array:
    return _sub(other, self, alpha)


def _div(self: Any, other: Any, rounding_mode: str | None = None) -> Array:
    match rounding_mode:
        case None:
            return jnp.true_divide(self, other)
        case "floor":
            return jnp.floor_divide(self, other)
        case "trunc":
            if jnp.issubdtype(jnp.result_type(self, other), jnp.integer):
                return jax.lax.div(*jnp.broadcast_arrays(self, other))
            return jnp.trunc(jnp.true_divide(self, other))
        case _:
            raise ValueError(
                f"div's rounding_mode must be None, floor or trunc, got {rounding_mode}"
            )


def _pow(self: Any, exponent: Any) -> Array:
    # A Python exponent that is whole stays an integer: x**2 is x*x, and its gradient at
    # a negative x is not NaN.
    if isinstance(exponent, float) and exponent.is_integer() and abs(exponent) < 64:
        exponent = int(exponent)
    return jnp.power(self, exponent)


def _clamp(self: Array, min: Any = None, max: Any = None) -> Array:
    # A select, and not minimum and maximum: torch passes the whole gradient at a bound.
    if min is not None:
        self = jnp.where(self < min, min, self)
    return self if max is None else jnp.where(self > max, max, self)


def _where(condition: Array, self: Any, other: Any) -> Array:
    return jnp.where(condition, self, other)


def _masked_fill(self: Array, mask: Array, value: Any) -> Array:
    return jnp.where(mask, jnp.asarray(value).astype(self.dtype), self)


def _addcmul(self: Array, tensor1: Array, tensor2: Array, value: Any = 1) -> Array:
    return self + value * tensor1 * tensor2


def _addcdiv(self: Array, tensor1: Array, tensor2: Array, value: Any = 1) -> Array:
    return self + value * tensor1 / tensor2


def _lerp(self: Array, end: Array, weight: Any) -> Array:
    return self + weight * (end - self)


def _isclose(
    self: Array,
    other: Array,
    rtol: float | int = 1e-5,
    atol: float | int = 1e-8,
    equal_nan: bool = False,
) -> Array:
    return jnp.isclose(self, other, rtol=rtol, atol=atol, equal_nan=equal_nan)


def _nan_to_num(
    self: Array, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> Array:
    return jnp.nan_to_num(
        self, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf
    )


def _sigmoid(self: Array) -> Array:
    return jax.nn.sigmoid(_to_float(self))


def _gelu(self: Array, approximate: str = "none") -> Array:
    return jax.nn.gelu(self, approximate=approximate == "tanh")


def _leaky_relu(self: Array, negative_slope: float | int = 0.01) -> Array:
    return jnp.where(self > 0, self, self * negative_slope)


def _prelu(self: Array, weight: Array) -> Array:
    slope = (
        weight if weight.size == 1 else weight.reshape((-1,) + (1,) * (self.ndim - 2))
    )
    return jnp.where(self > 0, self, self * slope)


def _elu(self: Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Array:
    negative = jnp.minimum(self, 0) * input_scale
    return scale * jnp.where(self > 0, self, alpha * jnp.expm1(negative))


def _softplus(self: Array, beta: Any = 1, threshold: Any = 20) -> Array:
    scaled = self * beta
    return jnp.where(
        scaled > threshold,
        self,
        jnp.log1p(jnp.exp(_clamp(scaled, max=threshold))) / beta,
    )


def _hardtanh(self: Array, min_val: Any = -1, max_val: Any = 1) -> Array:
    return _clamp(self, min_val, max_val)


def _glu(self: Array, dim: int = -1) -> Array:
    value, gate = jnp.split(self, 2, axis=dim)
    return value * jax.nn.sigmoid(gate)


def _threshold(self: Array, threshold: Any, value: Any) -> Array:
    return jnp.where(self > threshold, self, value)


def _round(self: Array, decimals: int = 0) -> Array:
    return jnp.round(self, decimals)


def _logit(self: Array, eps: float | int | None = None) -> Array:
    return special.logit(self if eps is None else _clamp(self, eps, 1 - eps))


def _xlogy(self: Any, other: Any) -> Array:
    return special.xlogy(self, other)


def _to_float(x: Array) -> Array:
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


_UNARY: dict[str, Op] = {
    "abs": absolute,
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "bitwise_not": jnp.bitwise_not,
    "ceil": jnp.ceil,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "erf": special.erf,
    "erfc": special.erfc,
    "erfinv": special.erfinv,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "frac": lambda x: x - jnp.trunc(x),
    "hardsigmoid": lambda x: _clamp(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * _clamp(x + 3, 0, 6) / 6,
    "isfinite": jnp.isfinite,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "lgamma": special.gammaln,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "log_sigmoid": jax.nn.log_sigmoid,
    "logical_not": jnp.logical_not,
    "mish": lambda x: x * jnp.tanh(_softplus(x)),
    "neg": jnp.negative,
    "reciprocal": jnp.reciprocal,
    "relu6": lambda x: _clamp(x, 0, 6),
    "rsqrt": lambda x: jax.lax.rsqrt(_to_float(x)),
    "selu": jax.nn.selu,
    "sgn": jnp.sign,
    "sigmoid": _sigmoid,
    "sign": jnp.sign,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "softsign": lambda x: x / (1 + jnp.abs(x)),
    "square": jnp.square,
    "tan": jnp.tan,
    "trunc": jnp.trunc,
}

_BINARY: dict[str, Op] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": jnp.multiply,
    "multiply": jnp.multiply,
    "div": _div,
    "divide": _div,
    "true_divide": _div,
    "floor_divide": jnp.floor_divide,
    "remainder": jnp.remainder,
    "fmod": jnp.fmod,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or,
    "__xor__": jnp.bitwise_xor,
    "__lshift__": jnp.left_shift,
    "__rshift__": jnp.right_shift,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
    "copysign": jnp.copysign,
    "xlogy": _xlogy,
}

OPS: dict[str, Op] = {
    **{f"aten.{name}.default": op for name, op in _UNARY.items()},
    **{
        f"aten.{name}.{overload}": op
        for name, op in _BINARY.items()
        for overload in ("Tensor", "Scalar")
    },
    "aten.eq.Scalar": jnp.equal,
    "aten.ne.Scalar": jnp.not_equal,
    "aten.div.Tensor_mode": _div,
    "aten.div.Scalar_mode": _div,
    "aten.floor_divide.default": jnp.floor_divide,
    "aten.pow.Tensor_Scalar": _pow,
    "aten.pow.Scalar": _pow,
    "aten.float_power.Tensor_Scalar": _pow,
    "aten.maximum.default": jnp.maximum,
    "aten.minimum.default": jnp.minimum,
    "aten.max.other": jnp.maximum,
    "aten.min.other": jnp.minimum,
    "aten.fmax.default": jnp.fmax,
    "aten.fmin.default": jnp.fmin,
    "aten.atan2.default": jnp.arctan2,
    "aten.hypot.default": jnp.hypot,
    "aten.logaddexp.default": jnp.logaddexp,
    "aten.logical_and.default": jnp.logical_and,
    "aten.logical_or.default": jnp.logical_or,
    "aten.logical_xor.default": jnp.logical_xor,
    "aten.clamp.default": _clamp,
    "aten.clamp.Tensor": _clamp,
    "aten.clip.default": _clamp,
    "aten.clamp_min.default": lambda self, min: _clamp(self, min=min),
    "aten.clamp_min.Tensor": lambda self, min: _clamp(self, min=min),
    "aten.clamp_max.default": lambda self, max: _clamp(self, max=max),
    "aten.clamp_max.Tensor": lambda self, max: _clamp(self, max=max),
    "aten.where.self": _where,
    "aten.where.ScalarOther": _where,
    "aten.where.ScalarSelf": _where,
    "aten.where.Scalar": _where,
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.masked_fill.Tensor": _masked_fill,
    "aten.addcmul.default": _addcmul,
    "aten.addcdiv.default": _addcdiv,
    "aten.lerp.Scalar": _lerp,
    "aten.lerp.Tensor": _lerp,
    "aten.isclose.default": _isclose,
    "aten.nan_to_num.default": _nan_to_num,
    "aten.gelu.default": _gelu,
    "aten.leaky_relu.default": _leaky_relu,
    "aten.prelu.default": _prelu,
    "aten._prelu_kernel.default": _prelu,
    "aten.elu.default": _elu,
    "aten.softplus.default": _softplus,
    "aten.hardtanh.default": _hardtanh,
    "aten.glu.default": _glu,
    "aten.threshold.default": _threshold,
    "aten.round.default": _round,
    "aten.round.decimals": _round,
    "aten.logit.default": _logit,
}
