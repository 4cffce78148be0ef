"""A family of models as one value: its config fields and its tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dew.converters.config.fields import COMMON, Field, Reading, build
from dew.converters.config.rope import RopeFields
from dew.converters.mapping.rules import Prefix, Rule
from dew.nn.config import DecoderConfig
from dew.nn.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A stored tensor that repeats a variable, as a tied output matrix does.

    `flag` is the config field that says whether it does; without one it always does.
    Of the family's architectures only `classes` have it, all where there are none.
    """

    source: str
    target: str
    flag: str | None = None
    classes: tuple[str, ...] = ()

    @property
    def rule(self) -> Rule:
        """The copy as a rule."""
        return Rule(self.source, self.target)


TIED_HEAD = Copy(
    source="lm_head.weight", target="embed/weight", flag="tie_word_embeddings"
)
"""The output matrix as most causal models tie it."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What `model_type` means: how its config and its tensors become ours.

    Stored names are written with the prefix `prefix`; `spellings` are the ways a file
    may spell it. `constants` are attributes that no field of the config states, and
    `parts` picks the class of an attribute whose annotation leaves a choice. `aliases`
    are other names of fields, with the name that the table uses. `ignored` names stored
    tensors that mean nothing: old buffers, mostly.
    """

    model_type: str
    architectures: tuple[str, ...]
    fields: Mapping[str, Field]
    rules: tuple[Rule, ...]
    ropes: tuple[RopeFields, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, type] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[Copy, ...] = ()
    ignored: tuple[str, ...] = ()
    prefix: str = "model."
    spellings: tuple[Prefix, ...] = (Prefix(body="model."), Prefix(body=""))
    config: type = DecoderConfig
    model: Callable[[Any], Any] = Decoder

    def read(self, config: Mapping[str, Any], ignore_fields: Sequence[str] = ()) -> Any:
        """Builds our config from a config.json.

        Raises:
            ValueError: fields that are unknown, of the wrong kind, or of a value that
                we do not reproduce; all of them are named.
        """
        config = {self.aliases.get(name, name): x for name, x in config.items()}
        reading = Reading(config=config, table={**COMMON, **self.fields})
        attributes = {**self.constants, **reading.attributes()}
        if not reading.faults:
            for rope in self.ropes:
                attributes[rope.to] = rope.read(reading)
        names = [name for rope in self.ropes for name in rope.names]
        reading.refuse_unknown(names, ignore_fields)
        if reading.faults:
            raise ValueError(
                f"config.json of {self.model_type!r} is not reproduced by the native "
                f"road: {'; '.join(reading.faults)}. Fields that mean nothing can be "
                "named in ignore_fields"
            )
        return build(self.config, attributes, self.parts)

    def has(self, copy: Copy, config: Mapping[str, Any]) -> bool:
        """Whether the config's architecture stores this copy at all."""
        named = config.get("architectures") or self.architectures
        return not copy.classes or named[0] in copy.classes

    def flag(self, config: Mapping[str, Any], name: str) -> bool:
        """The value of a boolean field, by the family's default where it is absent."""
        return bool(Reading(config=config, table=self.fields).get(name))

    def spelled(
        self, spelling: Prefix
    ) -> tuple[tuple[Rule, ...], tuple[Copy, ...], tuple[str, ...]]:
        """Returns rules, copies and ignored names as `spelling` writes them."""
        rules = tuple(
            Rule(spelling.spell(r.source, self.prefix), r.target, r.layout)
            for r in self.rules
        )
        copies = tuple(
            replace(c, source=spelling.spell(c.source, self.prefix))
            for c in self.copies
        )
        ignored = tuple(spelling.spell(name, self.prefix) for name in self.ignored)
        return rules, copies, ignored
