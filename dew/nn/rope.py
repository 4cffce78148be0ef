"""Rotary position embeddings, and their scalings for contexts past the trained one.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021). A
`Rope` rotates pairs of dimensions, and its `scaling` sets their frequencies: one class
below for each `rope_type` of transformers.

Frequencies are computed once on the host, in float32 with a correctly rounded power,
which gives torch's own bits but for one entry in a hundred.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def powers(theta: float, dim: int) -> np.ndarray:
    """Returns theta ** (2i / dim) for each of the dim / 2 pairs, float32 [pairs]."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


@runtime_checkable
class Scaling(Protocol):
    """Frequencies of a `Rope`, which may depend on the length of the context."""

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines."""
        ...

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Returns radians per position of each pair, for `length` tokens of context."""
        ...


@dataclass(frozen=True, kw_only=True)
class Unscaled:
    """`default`: pair i rotates by theta ** (-2i / dim) radians per position."""

    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Returns radians per position of each pair, at any context length."""
        return jnp.asarray(np.float32(1) / powers(theta, dim))


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """`linear`: positions are divided by `factor` (Chen et al., 2023)."""

    factor: float
    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Returns radians per position of each pair, at any context length."""
        return jnp.asarray(np.float32(1) / powers(theta, dim) / np.float32(self.factor))


@dataclass(frozen=True, kw_only=True)
class Proportional:
    """`proportional`: only the first `fraction` of the pairs is rotated.

    Unlike with a partial `Rope`, frequencies are spaced over the whole head.
    """

    fraction: float = 1.0
    factor: float = 1.0
    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Returns radians per position of each pair, at any context length."""
        rotated = np.arange(dim // 2) < int(self.fraction * dim // 2)
        frequencies = np.float32(1) / powers(theta, dim) / np.float32(self.factor)
        return jnp.asarray(np.where(rotated, frequencies, np.float32(0)))


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """`dynamic`: theta grows with the context once it is longer than `window`.

    The whole batch has one length, as in transformers.
    """

    factor: float
    window: int
    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Returns radians per position of each pair, at this context length."""
        longer = jnp.maximum(length, self.window).astype(jnp.float32)
        stretch = self.factor * longer / self.window - (self.factor - 1)
        base = theta * stretch ** (dim / (dim - 2))
        exponents = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
        return 1 / base**exponents


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """`yarn`: low frequencies are interpolated, high ones kept (Peng et al., 2023).

    `fast` and `slow` are the numbers of rotations over the original `window` between
    which the two are blended.
    """

    factor: float
    window: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Returns radians per position of each pair, at any context length."""
        # A pair that rotates many times within the trained window has had every angle
        # and keeps its frequency. One that does not complete a rotation would have new
        # angles past the window, so its positions are divided by the factor.
        low, high = (
            self._pair_of_rotations(n, theta, dim) for n in (self.fast, self.slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        # transformers widens an empty ramp by the same amount.
        width = high - low if high != low else 0.001
        pairs = np.arange(dim // 2, dtype=np.float32)
        ramp = np.clip((pairs - np.float32(low)) / np.float32(width), 0, 1)
        periods = powers(theta, dim)
        original = np.float32(1) / periods
        interpolated = np.float32(1) / (np.float32(self.factor) * periods)
        # 1 - (1 - ramp), not ramp: the order of rounding is the reference's.
        keep = 1 - ramp
        return jnp.asarray(interpolated * (1 - keep) + original * keep)

    def _pair_of_rotations(self, count: float, theta: float, dim: int) -> float:
        """Returns the index, as a real number, of a pair with so many rotations."""
        # Solves window · theta ** (-2i / dim) = 2π · count for i.
        return dim * math.log(self.window / (count * 2 * math.pi)) / 2 / math.log(theta)


def yarn_magnitude(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """Returns YaRN's attention factor, for configs that do not set it."""
    if mscale and mscale_all_dim:
        return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, weight: float) -> float:
    """Returns YaRN's factor of scores for positions divided by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """`longrope`: a divisor per pair, `long` ones past `window` (Ding et al., 2024).

    The whole batch uses the long divisors if its longest context does.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    window: int
    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Returns radians per position of each pair, at this context length."""
        periods = powers(theta, dim)
        short, long = (
            np.float32(1) / (np.asarray(divisors, np.float32) * periods)
            for divisors in (self.short, self.long)
        )
        # Selected by a traced length: one compiled program serves both, and within a
        # generation the switch comes at the token that crosses the window, as in
        # transformers.
        return jnp.where(length > self.window, jnp.asarray(long), jnp.asarray(short))


def longrope_magnitude(factor: float, window: int) -> float:
    """Returns LongRoPE's attention factor, for configs that do not set it."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(window))


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """`llama3`: frequencies of long wavelengths are divided by `factor`.

    Wavelengths above window / `low` positions are long, those below window / `high` are
    kept, and between them the two are blended.
    """

    factor: float
    low: float
    high: float
    window: int
    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Returns radians per position of each pair, at any context length."""
        plain = np.float32(1) / powers(theta, dim)
        wavelength = np.float32(2 * math.pi) / plain
        slow = wavelength > np.float32(self.window / self.low)
        fast = wavelength < np.float32(self.window / self.high)
        blend = np.float32(self.window) / wavelength - np.float32(self.low)
        blend = blend / np.float32(self.high - self.low)
        factor = np.float32(self.factor)
        mixed = (1 - blend) * plain / factor + blend * plain
        return jnp.asarray(np.where(slow, plain / factor, np.where(fast, plain, mixed)))


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding: rotates pairs of dimensions by angles that grow with position.

    >>> rope = Rope(dim=2)
    >>> positions = jnp.arange(3)[None]
    >>> cos, sin = rope.tables(positions)
    >>> [round(float(x), 3) for x in sin[0, :, 0]]
    [0.0, 0.841, 0.909]
    >>> rope.rotate(jnp.ones((1, 3, 4, 8)), (cos, sin)).shape
    (1, 3, 4, 8)
    """

    dim: int
    """Rotated dimensions of each head, the first ones; the others are unchanged."""
    theta: float = 10_000.0
    """Base of the frequencies."""
    scaling: Scaling = Unscaled()
    """Frequencies of the pairs, by context length."""
    interleaved: bool = False
    """Whether pairs are dimensions 2i and 2i + 1, not i and i + dim / 2 as in Hugging
    Face checkpoints."""
    sharpness: float = 1.0
    """Factor of the attention scores."""
    float32_rotation: bool = False
    """Whether heads are rotated in float32, not in their own dtype."""

    def tables(
        self, positions: Int[Array, "batch seq"]
    ) -> tuple[Float[Array, "batch seq dim"], Float[Array, "batch seq dim"]]:
        """Returns cosines and sines of every position's angles, float32."""
        length = jnp.max(positions) + 1
        frequencies = self.scaling.frequencies(self.theta, self.dim, length)
        angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
        if self.interleaved:
            angles = jnp.repeat(angles, 2, axis=-1)
        else:
            angles = jnp.concatenate([angles, angles], axis=-1)
        magnitude = self.scaling.magnitude
        return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude

    def rotate(
        self,
        x: Float[Array, "batch seq heads dim"],
        tables: tuple[Float[Array, "batch seq rot"], Float[Array, "batch seq rot"]],
    ) -> Float[Array, "batch seq heads dim"]:
        """Returns rotated queries or keys; dimensions past `dim` are unchanged.

        Cosines and sines are rounded to the dtype of the rotation first, as in torch.
        """
        rotated, rest = x[..., : self.dim], x[..., self.dim :]
        rotated = rotated.astype(jnp.float32) if self.float32_rotation else rotated
        cos, sin = (table[:, :, None, :].astype(rotated.dtype) for table in tables)
        rotated = rotated * cos + self._rotate_half(rotated) * sin
        rotated = rotated.astype(x.dtype)
        return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated

    def _rotate_half(
        self, x: Float[Array, "batch seq heads rot"]
    ) -> Float[Array, "batch seq heads rot"]:
        if self.interleaved:
            pairs = x.reshape(*x.shape[:-1], -1, 2)
            return jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(x.shape)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([-second, first], axis=-1)
