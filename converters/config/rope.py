"""Rotary embeddings as configs spell them, in transformers 4 and in transformers 5.

Version 4 has `rope_theta` beside a `rope_scaling` dict, version 5 one `rope_parameters`
dict. What wins where they disagree, and which keys a type reads, is what transformers
5.24 does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dew.converters.config.fields import Reading
from dew.converters.errors import nearest
from dew.nn.rope import (
    Dynamic,
    LinearScaling,
    Llama3,
    LongRope,
    Proportional,
    Rope,
    Scaling,
    Unscaled,
    Yarn,
    longrope_magnitude,
    yarn_magnitude,
    yarn_scale,
)

KEYS = frozenset(
    """
    rope_theta rope_type type partial_rotary_factor factor
    original_max_position_embeddings attention_factor beta_fast beta_slow short_factor
    long_factor low_freq_factor high_freq_factor mscale mscale_all_dim truncate
    max_position_embeddings
    """.split()
)
"""Keys that a rope dict may hold; a type that does not read one ignores it."""

SPELLINGS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""Fields beside which a config may state its rotary embedding."""


@dataclass(frozen=True, kw_only=True)
class RopeFields:
    """How a family states one rotary embedding, which becomes the attribute `to`.

    `head_dim` and `window` name the fields with the width of a head and the longest
    position. `partial` says that the family's code can turn part of a head; elsewhere
    transformers ignores partial_rotary_factor for `default` and fails for other types.
    `old_theta` and `old_fraction` are the version 4 fields that have this embedding's
    theta and turning part; None where no field has its theta. `layer_type` is where
    configs nest one dict for each kind of layer; of those, the embeddings that are
    `scaled` are the ones that rope_scaling means. `original` is the default of a class
    that has original_max_position_embeddings beside the dict, where it wins. `absent`
    is the dict of configs that have none, and `renamed` are types that mean another one
    here. `sharpens` says that mscale_all_dim multiplies scores, as in DeepSeek's code,
    and `wide` that the code turns heads in float32.
    """

    to: str = "attention.rope"
    theta: float = 10_000.0
    head_dim: str = "head_dim"
    window: str = "max_position_embeddings"
    partial: bool = False
    fraction: float = 1.0
    interleaved: bool = False
    layer_type: str | None = None
    scaled: bool = True
    old_theta: str | None = "rope_theta"
    old_fraction: str = "partial_rotary_factor"
    original: int | None = None
    absent: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    sharpens: bool = False
    wide: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The config fields that it accounts for."""
        names = (*SPELLINGS, self.old_fraction)
        return names if self.old_theta is None else (*names, self.old_theta)

    def read(self, reading: Reading) -> Rope | None:
        """Returns the rotary embedding, or None with its faults noted."""
        facts = self._standard(reading)
        faults = [
            f"{key} = {facts[key]!r} is unknown in a rope dict"
            f"{nearest(key, sorted(KEYS))}"
            for key in facts
            if key not in KEYS
        ]
        try:
            if not faults:
                return self._rope(facts, reading.get(self.head_dim))
        except (KeyError, TypeError, ValueError) as error:
            detail = f"lacks {error}" if type(error) is KeyError else str(error)
            faults.append(f"rope {facts!r}: {detail}")
        reading.faults.extend(faults)
        return None

    def _standard(self, reading: Reading) -> dict[str, Any]:
        """One flat dict, whichever way the config spells it."""
        config, window = reading.config, "original_max_position_embeddings"
        facts = self._stated(config)
        theta = config.get(self.old_theta or "", self.theta)
        facts.setdefault("rope_theta", theta)
        facts.setdefault("rope_type", facts.get("type", "default"))
        kind = facts["rope_type"]
        facts["rope_type"] = self.renamed.get(kind, kind)
        fraction = config.get(self.old_fraction, self.fraction)
        facts.setdefault("partial_rotary_factor", fraction)
        facts["max_position_embeddings"] = reading.get(self.window)
        if facts["rope_type"] in ("llama3", "yarn", "longrope"):
            original = config.get(window, self.original)
            if self.layer_type is None and original is not None:
                facts[window] = original
            facts.setdefault(window, facts["max_position_embeddings"])
        return facts

    def _stated(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config's own rope dict, of this kind of layer where it nests them."""
        old, new = config.get("rope_scaling"), config.get("rope_parameters")
        if self.layer_type is None:
            return dict(old or (self.absent if new is None else new))
        new = new or {}
        facts = dict(new.get(self.layer_type) or {"rope_type": "default"})
        if self.scaled:
            facts |= old or {}
        # transformers looks for truncate beside the kinds of layers and not in them.
        facts["truncate"] = new.get("truncate", True)
        return facts

    def _rope(self, facts: dict[str, Any], head_dim: int) -> Rope:
        kind, fraction = facts["rope_type"], facts["partial_rotary_factor"]
        if kind not in SCALINGS:
            raise ValueError(
                f"rope_type {kind!r} is none of {', '.join(sorted(SCALINGS))}"
            )
        if kind == "proportional" or (kind == "default" and not self.partial):
            dim = head_dim
        elif self.partial or fraction == 1:
            dim = int(head_dim * fraction)
        else:
            raise ValueError(
                f"partial_rotary_factor must be 1 for {kind!r} here, got {fraction}"
            )
        if dim % 2:
            raise ValueError(f"the turning part of a head must be even, got {dim}")
        return Rope(
            dim=dim,
            theta=float(facts["rope_theta"]),
            scaling=SCALINGS[kind](facts, dim),
            interleaved=self.interleaved,
            sharpness=self._sharpness(facts),
            float32_rotation=self.wide,
        )

    def _sharpness(self, facts: Mapping[str, Any]) -> float:
        whole = facts.get("mscale_all_dim")
        if not self.sharpens or not whole or facts["rope_type"] == "default":
            return 1.0
        return yarn_scale(float(facts["factor"]), float(whole)) ** 2


def _unscaled(facts: Mapping[str, Any], dim: int) -> Scaling:
    return Unscaled()


def _linear(facts: Mapping[str, Any], dim: int) -> Scaling:
    return LinearScaling(factor=float(facts["factor"]))


def _proportional(facts: Mapping[str, Any], dim: int) -> Scaling:
    return Proportional(
        fraction=facts["partial_rotary_factor"], factor=float(facts.get("factor", 1.0))
    )


def _dynamic(facts: Mapping[str, Any], dim: int) -> Scaling:
    return Dynamic(
        factor=float(facts["factor"]), window=facts["max_position_embeddings"]
    )


def _stretch(facts: Mapping[str, Any], factor: float | None) -> float:
    """The factor, or what the two windows imply."""
    if factor is not None:
        return float(factor)
    window: int = facts["max_position_embeddings"]
    return window / facts["original_max_position_embeddings"]


def _yarn(facts: Mapping[str, Any], dim: int) -> Scaling:
    factor = _stretch(facts, facts["factor"])
    magnitude = facts.get("attention_factor")
    if magnitude is None:
        magnitude = yarn_magnitude(
            factor, facts.get("mscale"), facts.get("mscale_all_dim")
        )
    return Yarn(
        factor=factor,
        window=facts["original_max_position_embeddings"],
        fast=float(facts.get("beta_fast") or 32),
        slow=float(facts.get("beta_slow") or 1),
        truncate=bool(facts.get("truncate", True)),
        magnitude=float(magnitude),
    )


def _longrope(facts: Mapping[str, Any], dim: int) -> Scaling:
    window = facts["original_max_position_embeddings"]
    magnitude = facts.get("attention_factor")
    if magnitude is None:
        magnitude = longrope_magnitude(_stretch(facts, facts.get("factor")), window)
    return LongRope(
        short=_stretches(facts, "short_factor", dim),
        long=_stretches(facts, "long_factor", dim),
        window=window,
        magnitude=float(magnitude),
    )


def _stretches(facts: Mapping[str, Any], name: str, dim: int) -> tuple[float, ...]:
    stretches: Sequence[float] = facts[name]
    if len(stretches) != dim // 2:
        raise ValueError(
            f"{name} must have one number for each of the {dim // 2} pairs, got "
            f"{len(stretches)}"
        )
    return tuple(float(stretch) for stretch in stretches)


def _llama3(facts: Mapping[str, Any], dim: int) -> Scaling:
    return Llama3(
        factor=float(facts["factor"]),
        low=float(facts["low_freq_factor"]),
        high=float(facts["high_freq_factor"]),
        window=facts["original_max_position_embeddings"],
    )


SCALINGS: Mapping[str, Callable[[Mapping[str, Any], int], Scaling]] = {
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
"""What makes our value of each `rope_type`."""
