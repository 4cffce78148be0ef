"""Rotary position embeddings, with every way of stretching them past their window.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021). A
`Rope` says how fast each pair of dimensions turns; its `scaling` is one of the small
values below, one for each `rope_type` that transformers knows.

Frequencies are worked out on the host once, in float32 with a correctly rounded power,
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
    """How the frequencies of a `Rope` change with the context."""

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        ...

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Radians per position of each pair, for a context of `length` tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Unscaled:
    """`default`: every pair turns at theta ** (-2i / dim)."""

    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Radians per position of each pair."""
        return jnp.asarray(np.float32(1) / powers(theta, dim))


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """`linear`: positions are divided by `factor` (Chen et al., 2023)."""

    factor: float
    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Radians per position of each pair."""
        return jnp.asarray(np.float32(1) / powers(theta, dim) / np.float32(self.factor))


@dataclass(frozen=True, kw_only=True)
class Proportional:
    """`proportional`: the first `fraction` of the pairs turn, the others stand still.

    Unlike a partial `Rope`, frequencies are spaced over the whole head.
    """

    fraction: float = 1.0
    factor: float = 1.0
    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Radians per position of each pair."""
        turning = np.arange(dim // 2) < int(self.fraction * dim // 2)
        speeds = np.float32(1) / powers(theta, dim) / np.float32(self.factor)
        return jnp.asarray(np.where(turning, speeds, np.float32(0)))


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """`dynamic`: theta grows with the context once it is longer than `window`.

    The length is one for the whole batch, as in transformers.
    """

    factor: float
    window: int
    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Radians per position of each pair, at this length of context."""
        longer = jnp.maximum(length, self.window).astype(jnp.float32)
        stretch = self.factor * longer / self.window - (self.factor - 1)
        base = theta * stretch ** (dim / (dim - 2))
        exponents = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
        return 1 / base**exponents


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """`yarn`: slow pairs are interpolated, fast ones kept (Peng et al., 2023).

    `fast` and `slow` are the numbers of turns over the original `window` between which
    the two are blended.
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
        """Radians per position of each pair."""
        low, high = (self._pair_turning(n, theta, dim) for n in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        # transformers widens an empty ramp by the same amount.
        width = high - low if high != low else 0.001
        pairs = np.arange(dim // 2, dtype=np.float32)
        ramp = np.clip((pairs - np.float32(low)) / np.float32(width), 0, 1)
        periods = powers(theta, dim)
        kept = np.float32(1) / periods
        interpolated = np.float32(1) / (np.float32(self.factor) * periods)
        # 1 - (1 - ramp), not ramp: the order of rounding is the reference's.
        keep = 1 - ramp
        return jnp.asarray(interpolated * (1 - keep) + kept * keep)

    def _pair_turning(self, turns: float, theta: float, dim: int) -> float:
        """The pair, as a real number, that turns `turns` times over the window."""
        return dim * math.log(self.window / (turns * 2 * math.pi)) / 2 / math.log(theta)


def yarn_magnitude(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """The attention factor that YaRN infers where a config does not state it."""
    if mscale and mscale_all_dim:
        return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, weight: float) -> float:
    """How much attention sharpens when positions are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """`longrope`: one stretch per pair, another set past `window` (Ding et al., 2024).

    The whole batch takes the long set as soon as its longest context needs it.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    window: int
    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Radians per position of each pair, at this length of context."""
        periods = powers(theta, dim)
        short, long = (
            np.float32(1) / (np.asarray(stretch, np.float32) * periods)
            for stretch in (self.short, self.long)
        )
        return jnp.where(length > self.window, jnp.asarray(long), jnp.asarray(short))


def longrope_magnitude(factor: float, window: int) -> float:
    """The attention factor that LongRoPE infers where a config does not state it."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(window))


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """`llama3`: long wavelengths are divided by `factor`, short ones kept.

    Between window / `low` and window / `high` positions the two are blended.
    """

    factor: float
    low: float
    high: float
    window: int
    magnitude: float = 1.0

    def frequencies(
        self, theta: float, dim: int, length: Int[Array, ""]
    ) -> Float[Array, " pairs"]:
        """Radians per position of each pair."""
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
    """Turns the first `dim` dimensions of each head by angles that grow with position.

    Pairs are dimension i with i + dim / 2 (the two halves, as Hugging Face stores
    them), or 2i with 2i + 1 where `interleaved`. Scores are multiplied by `sharpness`.
    Heads are turned in their own dtype, or in float32 where `float32_rotation`.
    """

    dim: int
    theta: float = 10_000.0
    scaling: Scaling = Unscaled()
    interleaved: bool = False
    sharpness: float = 1.0
    float32_rotation: bool = False

    def tables(
        self, positions: Int[Array, "batch seq"]
    ) -> tuple[Float[Array, "batch seq dim"], Float[Array, "batch seq dim"]]:
        """Cosines and sines for every position, float32, laid out like a head."""
        length = jnp.max(positions) + 1
        speeds = self.scaling.frequencies(self.theta, self.dim, length)
        angles = positions[:, :, None].astype(jnp.float32) * speeds[None, None, :]
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
        """Turns queries or keys; dimensions past `dim` pass through.

        Cosines and sines are rounded to the dtype they turn in first, as torch does.
        """
        turned, rest = x[..., : self.dim], x[..., self.dim :]
        turned = turned.astype(jnp.float32) if self.float32_rotation else turned
        cos, sin = (table[:, :, None, :].astype(turned.dtype) for table in tables)
        turned = turned * cos + self._quarter_turn(turned) * sin
        turned = turned.astype(x.dtype)
        return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned

    def _quarter_turn(
        self, x: Float[Array, "batch seq heads rot"]
    ) -> Float[Array, "batch seq heads rot"]:
        if self.interleaved:
            pairs = x.reshape(*x.shape[:-1], -1, 2)
            return jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(x.shape)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([-second, first], axis=-1)
