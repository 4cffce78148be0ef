"""A model family as one value: its config fields and its stored tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dew.converters.config.fields import COMMON, Field, Reading, Values, build
from dew.converters.config.known_fields import KnownFields, known_fields
from dew.converters.config.rope import RopeFields
from dew.converters.errors import UnsupportedError
from dew.converters.mapping.rules import Prefix, Rule
from dew.nn.config import DecoderConfig, EncoderConfig
from dew.nn.decoder import Decoder


class UnsupportedConfigError(UnsupportedError):
    """A config that transformers reads and the native road does not reproduce."""


ADVICE = (
    ". The lowered road takes what transformers takes: --road lowered (road='lowered')."
    " A field that means nothing can be named in --ignore-fields (ignore_fields)"
)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A stored tensor that repeats a variable, as a tied output matrix does.

    `flag` is the config field that is true if it does; without a flag it always does.
    `classes` are the architectures of the family that store it; empty means all.
    """

    source: str
    target: str
    flag: str | None = None
    classes: tuple[str, ...] = ()

    @property
    def rule(self) -> Rule:
        """Rule that reads the copy as its variable."""
        return Rule(self.source, self.target)


TIED_HEAD = Copy(
    source="lm_head.weight", target="embed/weight", flag="tie_word_embeddings"
)
"""Output matrix that repeats the embedding, as most causal models tie it."""


def is_trunk(architecture: str) -> bool:
    """Whether a class of transformers ends at its hidden states, as LlamaModel does."""
    return architecture.endswith("Model") and not architecture.endswith("LMHeadModel")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`: its config fields and stored tensors, and our model of it.

    Attributes:
        model_type: name in config.json.
        architectures: class names of transformers; the first is the default.
        fields: accounting for each config field.
        rules: one rule for each stored tensor, named with `prefix`.
        ropes: rotary embeddings, each with the fields that state it.
        constants: attributes of our config that no field states.
        parts: class of each attribute whose annotation leaves a choice.
        aliases: other names of fields, with the name that the table uses.
        copies: stored tensors that repeat a variable.
        ignored: names of stored tensors without effect, mostly old buffers.
        prefix: prefix of stored names as the rules have them.
        spellings: prefixes that a file may have in its place.
        config: class of our config.
        model: class of our model, built from the config.

    >>> from dew.converters.families import FAMILIES
    >>> config = FAMILIES["llama"].read({"hidden_size": 64, "num_attention_heads": 4})
    >>> config.embed, config.attention.head_dim, config.attention.rope.theta
    (64, 16, 10000.0)
    """

    model_type: str
    architectures: tuple[str, ...]
    fields: Mapping[str, Field]
    rules: tuple[Rule, ...]
    ropes: tuple[RopeFields, ...] = ()
    constants: Values = field(default_factory=dict)
    parts: Mapping[str, type] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[Copy, ...] = ()
    ignored: tuple[str, ...] = ()
    prefix: str = "model."
    spellings: tuple[Prefix, ...] = (Prefix(body="model."), Prefix(body=""))
    config: type[DecoderConfig] | type[EncoderConfig] = DecoderConfig
    model: Callable[[Any], Any] = Decoder

    @property
    def known(self) -> KnownFields:
        """Fields that transformers knows of this family's configs."""
        return known_fields(self.model_type)

    def read(self, config: Values, ignore_fields: Sequence[str] = ()) -> Any:
        """Builds our config from the content of a config.json.

        Fields that transformers does not know, and those named in `ignore_fields`, have
        no effect; `ignored_fields` lists them.

        Raises:
            UnsupportedConfigError: fields or values that transformers reads and the
                native model does not reproduce; all of them are named.
            ValueError: values of a wrong type are among the faults.
        """
        reading, attributes = self._reading(config, ignore_fields)
        if reading.faults:
            fault = (
                f"config.json of {self.model_type!r} is not reproduced by the native "
                f"road: {'; '.join(reading.faults)}"
            )
            if reading.malformed:
                raise ValueError(fault)
            raise UnsupportedConfigError(fault, ADVICE)
        return build(self.config, attributes, self.parts)

    def ignored_fields(
        self, config: Values, ignore_fields: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Returns the fields of a config.json that have no effect here.

        Those that transformers does not know, and those in `ignore_fields`. A key of a
        rope dict is named behind a dot: `rope_scaling.finetuned`.
        """
        return tuple(self._reading(config, ignore_fields)[0].ignored)

    def _reading(
        self, config: Values, ignore_fields: Sequence[str]
    ) -> tuple[Reading, dict[str, Any]]:
        config = self._standard_names(config)
        reading = Reading(config=config, table={**COMMON, **self.fields})
        attributes = {**self.constants, **reading.attributes()}
        # A rope reads sizes such as head_dim: faults in those would be listed twice.
        if not reading.faults:
            for rope in self.ropes:
                attributes[rope.to] = rope.read(reading, ignore_fields)
        if self.is_trunk(config):
            attributes = {
                name: value
                for name, value in attributes.items()
                if not name.startswith("head.")
            }
            attributes["head"] = None
            if attributes.get("embedding_width") is not None:
                reading.faults.append(
                    "a trunk whose hidden states are narrowed to word_embed_proj_dim"
                )
        names = [name for rope in self.ropes for name in rope.names]
        reading.account_for_others(names, self.known, ignore_fields)
        return reading, attributes

    def _standard_names(self, config: Values) -> dict[str, Any]:
        """The config with aliases replaced, which win in transformers where stated."""
        stated = {name: x for name, x in config.items() if name not in self.aliases}
        renamed = {
            self.aliases[name]: x
            for name, x in config.items()
            if name in self.aliases and x is not None
        }
        return stated | renamed

    def is_trunk(self, config: Values) -> bool:
        """Whether the config's architecture is a decoder without a head."""
        names = config.get("architectures") or self.architectures
        return self.config is DecoderConfig and is_trunk(names[0])

    def head_names(self, rules: Sequence[Rule], copies: Sequence[Copy]) -> set[str]:
        """Returns the names of a decoder's head in rules and copies of a spelling."""
        own = {rule.source for rule in rules if rule.target.startswith("head/")}
        return own | {copy.source for copy in copies if copy.target == "embed/weight"}

    def has(self, copy: Copy, config: Values) -> bool:
        """Whether the config's architecture stores this copy."""
        if copy.target == "embed/weight" and self.is_trunk(config):
            return False
        names = config.get("architectures") or self.architectures
        return not copy.classes or names[0] in copy.classes

    def flag(self, config: Values, name: str) -> bool:
        """Value of a boolean field, the family's default where it is left out."""
        return bool(Reading(config=config, table=self.fields).get(name))

    def with_spelling(
        self, spelling: Prefix
    ) -> tuple[tuple[Rule, ...], tuple[Copy, ...], tuple[str, ...]]:
        """Returns rules, copies and ignored names with the prefix of `spelling`."""
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
