"""Rotary embeddings from configs of transformers 4 and transformers 5.

Version 4 has `rope_theta` beside a `rope_scaling` dict, version 5 one `rope_parameters`
dict. Which one wins where they disagree, and which keys a type reads, follows
transformers 5.24.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dew.converters.config.fields import Reading, Values
from dew.converters.config.known_fields import read_rope_keys
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
"""Keys of a rope dict that we read; types that do not read a key ignore it."""

SPELLINGS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""Config fields in which a rotary embedding may be stated."""


@dataclass(frozen=True, kw_only=True)
class RopeFields:
    """One rotary embedding of a family, and the config fields that state it.

    Attributes:
        to: attribute of our config that it becomes.
        theta: base of the frequencies where the config states none.
        head_dim: name of the field with the width of a head.
        window: name of the field with the longest position.
        partial: whether the family's code can rotate part of a head. Elsewhere
            transformers ignores partial_rotary_factor for `default` and fails for
            other types.
        fraction: rotated part of a head where the config states none.
        interleaved: whether pairs are adjacent dimensions, not the two halves.
        layer_type: key of this embedding in configs with one dict per layer type.
        takes_rope_scaling: whether a version 4 `rope_scaling` dict applies to this
            layer type.
        old_theta: version 4 field with the theta; None where no field has it.
        old_fraction: version 4 field with the rotated part.
        original_window: class default of original_max_position_embeddings, for
            classes that have it beside the dict, where it wins.
        default: rope dict of a config that has none.
        type_aliases: rope types that mean another type in this family.
        uses_mscale_all_dim: whether mscale_all_dim multiplies attention scores, as in
            DeepSeek's code.
        float32_rotation: whether heads are rotated in float32.
    """

    to: str = "attention.rope"
    theta: float = 10_000.0
    head_dim: str = "head_dim"
    window: str = "max_position_embeddings"
    partial: bool = False
    fraction: float = 1.0
    interleaved: bool = False
    layer_type: str | None = None
    takes_rope_scaling: bool = True
    old_theta: str | None = "rope_theta"
    old_fraction: str = "partial_rotary_factor"
    original_window: int | None = None
    default: Values = field(default_factory=dict)
    type_aliases: Mapping[str, str] = field(default_factory=dict)
    uses_mscale_all_dim: bool = False
    float32_rotation: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the config fields that state this embedding."""
        names = (*SPELLINGS, self.old_fraction)
        return names if self.old_theta is None else (*names, self.old_theta)

    def read(self, reading: Reading, ignore: Sequence[str] = ()) -> Rope | None:
        """Returns the rotary embedding; None if faulty, with the faults noted.

        Keys that transformers does not read, and those in `ignore`, are noted as
        ignored.
        """
        facts = self._standard(reading)
        faults = []
        for key in sorted(facts.keys() - KEYS):
            field = self._field_of(key, reading.config)
            if key in read_rope_keys() and key not in ignore and field not in ignore:
                faults.append(
                    f"{field} = {facts[key]!r} is read by transformers and not by this "
                    "road"
                )
            elif field not in reading.ignored:
                reading.ignored.append(field)
        try:
            if not faults:
                return self._rope(facts, reading.get(self.head_dim))
        except (KeyError, TypeError, ValueError) as error:
            detail = f"lacks {error}" if type(error) is KeyError else str(error)
            faults.append(f"rope {facts!r}: {detail}")
        reading.faults.extend(faults)
        return None

    def _field_of(self, key: str, config: Values) -> str:
        """Names the config field and the key in it: `rope_scaling.finetuned`."""
        names = [n for n in ("rope_scaling", "rope_parameters") if config.get(n)]
        for name in names:
            inner = config[name].get(self.layer_type)
            if isinstance(inner, Mapping) and key in inner:
                return f"{name}.{self.layer_type}.{key}"
            if key in config[name]:
                return f"{name}.{key}"
        return key

    def _standard(self, reading: Reading) -> dict[str, Any]:
        """One flat dict of all keys, with defaults, for either version's spelling."""
        config, window = reading.config, "original_max_position_embeddings"
        facts = self._rope_dict(config)
        theta = config.get(self.old_theta or "", self.theta)
        # Keys of the dict win over fields beside it, so these only fill gaps.
        facts.setdefault("rope_theta", theta)
        facts.setdefault("rope_type", facts.get("type", "default"))
        kind = facts["rope_type"]
        facts["rope_type"] = self.type_aliases.get(kind, kind)
        fraction = config.get(self.old_fraction, self.fraction)
        facts.setdefault("partial_rotary_factor", fraction)
        facts["max_position_embeddings"] = reading.get(self.window)
        # Only these types read an original window; a stray one elsewhere is inert.
        if facts["rope_type"] in ("llama3", "yarn", "longrope"):
            original = config.get(window, self.original_window)
            if self.layer_type is None and original is not None:
                facts[window] = original
            facts.setdefault(window, facts["max_position_embeddings"])
        return facts

    def _rope_dict(self, config: Values) -> dict[str, Any]:
        """The config's own rope dict, that of this layer type where it nests them."""
        old, new = config.get("rope_scaling"), config.get("rope_parameters")
        if self.layer_type is None:
            return dict(old or (self.default if new is None else new))
        new = new or {}
        facts = dict(new.get(self.layer_type) or {"rope_type": "default"})
        if self.takes_rope_scaling:
            facts |= old or {}
        # transformers reads truncate beside the layer types, not inside them.
        facts["truncate"] = new.get("truncate", True)
        return facts

    def _rope(self, facts: dict[str, Any], head_dim: int) -> Rope:
        kind, fraction = facts["rope_type"], facts["partial_rotary_factor"]
        if kind not in SCALINGS:
            raise ValueError(
                f"rope_type {kind!r} is none of {', '.join(sorted(SCALINGS))}"
            )
        # "proportional" applies its fraction to the frequencies, not to the width.
        if kind == "proportional" or (kind == "default" and not self.partial):
            dim = head_dim
        elif self.partial or fraction == 1:
            dim = int(head_dim * fraction)
        else:
            raise ValueError(
                f"partial_rotary_factor must be 1 for {kind!r} here, got {fraction}"
            )
        if dim % 2:
            raise ValueError(f"the rotated part of a head must be even, got {dim}")
        return Rope(
            dim=dim,
            theta=float(facts["rope_theta"]),
            scaling=SCALINGS[kind](facts, dim),
            interleaved=self.interleaved,
            sharpness=self._sharpness(facts),
            float32_rotation=self.float32_rotation,
        )

    def _sharpness(self, facts: Values) -> float:
        mscale = facts.get("mscale_all_dim")
        if (
            not self.uses_mscale_all_dim
            or not mscale
            or facts["rope_type"] == "default"
        ):
            return 1.0
        # Squared: DeepSeek's code multiplies the scale of scores by it twice.
        return yarn_scale(float(facts["factor"]), float(mscale)) ** 2


def _no_scaling(facts: Values, dim: int) -> Scaling:
    return Unscaled()


def _linear(facts: Values, dim: int) -> Scaling:
    return LinearScaling(factor=float(facts["factor"]))


def _proportional(facts: Values, dim: int) -> Scaling:
    return Proportional(
        fraction=facts["partial_rotary_factor"], factor=float(facts.get("factor", 1.0))
    )


def _dynamic(facts: Values, dim: int) -> Scaling:
    return Dynamic(
        factor=float(facts["factor"]), window=facts["max_position_embeddings"]
    )


def _stretch_factor(facts: Values, factor: float | int | None) -> float:
    """The stated factor, or the quotient of the long and the original window."""
    if factor is not None:
        return float(factor)
    window: int = facts["max_position_embeddings"]
    return window / facts["original_max_position_embeddings"]


def _yarn(facts: Values, dim: int) -> Scaling:
    factor = _stretch_factor(facts, facts["factor"])
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


def _longrope(facts: Values, dim: int) -> Scaling:
    window = facts["original_max_position_embeddings"]
    magnitude = facts.get("attention_factor")
    if magnitude is None:
        magnitude = longrope_magnitude(
            _stretch_factor(facts, facts.get("factor")), window
        )
    return LongRope(
        short=_pair_factors(facts, "short_factor", dim),
        long=_pair_factors(facts, "long_factor", dim),
        window=window,
        magnitude=float(magnitude),
    )


def _pair_factors(facts: Values, name: str, dim: int) -> tuple[float, ...]:
    factors: Sequence[float] = facts[name]
    if len(factors) != dim // 2:
        raise ValueError(
            f"{name} must have one number for each of the {dim // 2} pairs, got "
            f"{len(factors)}"
        )
    return tuple(float(factor) for factor in factors)


def _llama3(facts: Values, dim: int) -> Scaling:
    return Llama3(
        factor=float(facts["factor"]),
        low=float(facts["low_freq_factor"]),
        high=float(facts["high_freq_factor"]),
        window=facts["original_max_position_embeddings"],
    )


SCALINGS: Mapping[str, Callable[[Values, int], Scaling]] = {
    "default": _no_scaling,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
"""Builder of our scaling for each `rope_type`: of the rope dict and the width."""
