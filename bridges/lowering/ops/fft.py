"""Fourier and complex ops, and the few of linear algebra that models use."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

from dew.bridges.lowering.ops.op import Op


def _pairs(self: Array) -> Array:
    return jnp.stack([self.real, self.imag], axis=-1)


def _complex(self: Array) -> Array:
    return self[..., 0] + 1j * self[..., 1]


def _polar(abs: Array, angle: Array) -> Array:
    return abs * jnp.exp(1j * angle)


def _rfft(self: Array, n: Any = None, dim: int = -1, norm: str | None = None) -> Array:
    return jnp.fft.rfft(self, n, dim, norm)


def _irfft(self: Array, n: Any = None, dim: int = -1, norm: str | None = None) -> Array:
    return jnp.fft.irfft(self, n, dim, norm)


def _fft(self: Array, n: Any = None, dim: int = -1, norm: str | None = None) -> Array:
    return jnp.fft.fft(self, n, dim, norm)


def _ifft(self: Array, n: Any = None, dim: int = -1, norm: str | None = None) -> Array:
    return jnp.fft.ifft(self, n, dim, norm)


def _fft_many(
    self: Array,
    s: Any = None,
    dim: Sequence[int] | None = None,
    norm: str | None = None,
) -> Array:
    return jnp.fft.fftn(self, s, None if dim is None else tuple(dim), norm)


def _triangular(
    self: Array,
    B: Array,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Array:
    if left:
        return solve_triangular(self, B, lower=not upper, unit_diagonal=unitriangular)
    flipped = jnp.swapaxes(self, -1, -2)
    out = solve_triangular(
        flipped, jnp.swapaxes(B, -1, -2), lower=upper, unit_diagonal=unitriangular
    )
    return jnp.swapaxes(out, -1, -2)


OPS: dict[str, Op] = {
    "aten.view_as_real.default": _pairs,
    "aten.view_as_complex.default": _complex,
    "aten.polar.default": _polar,
    "aten.complex.default": lambda real, imag: real + 1j * imag,
    "aten.real.default": jnp.real,
    "aten.imag.default": jnp.imag,
    "aten.conj.default": jnp.conj,
    "aten.angle.default": jnp.angle,
    "aten.fft_rfft.default": _rfft,
    "aten.fft_irfft.default": _irfft,
    "aten.fft_fft.default": _fft,
    "aten.fft_ifft.default": _ifft,
    "aten.fft_fft2.default": _fft_many,
    "aten.fft_fftn.default": _fft_many,
    "aten.linalg_solve_triangular.default": _triangular,
    "aten.linalg_inv.default": jnp.linalg.inv,
    "aten.inverse.default": jnp.linalg.inv,
}
