"""Accounting for a config: every field is used, has no effect, or is refused.

A family's table lists for each field of its Hugging Face config what becomes of it:
`Use` puts its value into our config, `Read` leaves it to other fields that read it,
`Inert` marks a field that changes no logit, `Only` accepts the values that change none.
Of a field that is not in the table, `dew.converters.config.known_fields` says whether
the code of transformers reads it: then it is refused, else it has no effect there and
none here. Defaults are those of the transformers class, which count where a config.json
leaves a field out.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol, get_args, get_type_hints, runtime_checkable

from dew.converters.config.known_fields import KnownFields
from dew.converters.errors import nearest

Values = Mapping[str, Any]
"""Names and their values, as JSON has them."""

Lookup = Callable[[str], Any]
"""Value of another config field by its name, or that field's default."""


@runtime_checkable
class Derived(Protocol):
    """A default that depends on the values of other fields."""

    @property
    def kind(self) -> type:
        """Type that a stated value of the field must have."""
        return int

    def value(self, get: Lookup) -> object:
        """Computes the default; `get` returns another field's value."""
        ...


@dataclass(frozen=True)
class Same(Derived):
    """Default that equals another field: num_key_value_heads is the query heads."""

    name: str

    def value(self, get: Lookup) -> object:
        """Value of the field `name`, unchanged."""
        return get(self.name)


@dataclass(frozen=True)
class Quotient(Derived):
    """Default that divides one field by another: head_dim is width over heads."""

    dividend: str
    divisor: str

    def value(self, get: Lookup) -> int:
        """Quotient of the two fields, rounded down."""
        return get(self.dividend) // get(self.divisor)


@dataclass(frozen=True)
class Product(Derived):
    """Default that multiplies a field: an MLP is 4 times as wide as the model."""

    name: str
    factor: int

    def value(self, get: Lookup) -> int:
        """Value of the field `name` times `factor`."""
        return get(self.name) * self.factor


@runtime_checkable
class Field(Protocol):
    """Accounting for one config field: its default, its faults, what it sets."""

    @property
    def default(self) -> object:
        """Value of a config that leaves the field out: a constant or a `Derived`."""
        ...

    def fault(self, value: object) -> str | None:
        """Reason why a value is refused, or None where it is accepted."""
        ...

    def attributes(self, value: object, get: Lookup) -> Values:
        """Attributes of our config that the field sets: dotted names and values."""
        ...


@dataclass(frozen=True)
class Use:
    """A field whose value, transformed or as it is, becomes attributes of our config.

    The value set is `read(value, *values of the fields inputs)`; without `read` it is
    the value itself. `to` names one or more dotted attributes. `choices` lists the
    accepted values where they can be listed; null is accepted if `nullable`.

    >>> from dew.converters.config import Use
    >>> use = Use("head.scale", 1.0, read=lambda divisor: 1 / divisor)
    >>> use.attributes(8.0, {}.get)
    {'head.scale': 0.125}
    >>> use.fault("eight")
    "must be a float, got 'eight'"
    """

    to: str | tuple[str, ...]
    default: Any
    read: Callable[..., Any] | None = None
    inputs: tuple[str, ...] = ()
    choices: Collection[Any] = ()
    nullable: bool = False

    def fault(self, value: object) -> str | None:
        """Refuses values that are not in `choices` or not of the default's type."""
        if self.choices and value not in self.choices:
            listed = ", ".join(repr(choice) for choice in self.choices)
            return f"must be one of {listed}, got {value!r}"
        if value is None and self.nullable:
            return None
        return _type_fault(value, self.default)

    def attributes(self, value: object, get: Lookup) -> Values:
        """Each attribute of `to` with the transformed value."""
        # JSON has one kind of number: a file may say 0 for 0.0.
        if type(self.default) is float and type(value) is int:
            value = float(value)
        if self.read is not None:
            value = self.read(value, *(get(name) for name in self.inputs))
        targets = (self.to,) if type(self.to) is str else self.to
        return dict.fromkeys(targets, value)


@dataclass(frozen=True, init=False)
class MultiUse:
    """A field that several attributes of our config read, each in its own way."""

    uses: tuple[Use, ...]

    def __init__(self, *uses: Use) -> None:
        object.__setattr__(self, "uses", uses)

    @property
    def default(self) -> object:
        """Default of the first use, which all of them share."""
        return self.uses[0].default

    def fault(self, value: object) -> str | None:
        """Reason why the first use refuses a value."""
        return self.uses[0].fault(value)

    def attributes(self, value: object, get: Lookup) -> Values:
        """Attributes that all of the uses set."""
        merged: dict[str, object] = {}
        for use in self.uses:
            merged |= use.attributes(value, get)
        return merged


@dataclass(frozen=True)
class Read:
    """A field that sets nothing itself: RoPE or other fields read its value."""

    default: Any = None
    nullable: bool = False
    is_text_too: bool = False
    """Whether a string is accepted as well, which the fields that read it refuse."""

    def fault(self, value: object) -> str | None:
        """Refuses values of another type than the default's."""
        if (value is None and self.nullable) or (
            type(value) is str and self.is_text_too
        ):
            return None
        return _type_fault(value, self.default)

    def attributes(self, value: object, get: Lookup) -> Values:
        """No attributes: other fields use the value."""
        return {}


@dataclass(frozen=True)
class Inert:
    """A field no value of which changes what the model computes."""

    default: Any = None

    def fault(self, value: object) -> str | None:
        """Accepts every value, of any type."""
        return None

    def attributes(self, value: object, get: Lookup) -> Values:
        """No attributes: the value has no effect."""
        return {}


@dataclass(frozen=True, init=False)
class Only:
    """A field of which only values that change nothing are accepted.

    The first one is the default; all others are refused.
    """

    accepted: tuple[Any, ...]

    def __init__(self, *accepted: object) -> None:
        object.__setattr__(self, "accepted", accepted)

    @property
    def default(self) -> object:
        """The first of the accepted values."""
        return self.accepted[0]

    def fault(self, value: object) -> str | None:
        """Refuses every value that is not listed."""
        if any(_equal(value, accepted) for accepted in self.accepted):
            return None
        listed = " or ".join(repr(a) for a in self.accepted)
        return f"must be {listed} on the native road, got {value!r}"

    def attributes(self, value: object, get: Lookup) -> Values:
        """No attributes: an accepted value has no effect."""
        return {}


def _equal(value: object, accepted: object) -> bool:
    # In Python 1 == True, but a config that has 1 for a flag is a mistake to report.
    return value == accepted and (type(value) is bool) == (type(accepted) is bool)


def _type_fault(value: object, default: object) -> str | None:
    """Reason why a value is refused: its type is not that of the default."""
    # JSON has one kind of number, so 1 stands for 1.0 but 1.0 not for a size.
    types = {bool: (bool,), int: (int,), float: (float, int), str: (str,)}
    accepted = types.get(type(default))
    if isinstance(default, Derived):
        accepted = (default.kind,)
    if accepted is None or type(value) in accepted:
        return None
    return f"must be a {accepted[0].__name__}, got {value!r}"


@dataclass(kw_only=True)
class Reading:
    """One config while it is read: values by name, and what was found so far.

    Attributes:
        config: fields of the config.
        table: accounting for each field.
        faults: reasons why the config is refused.
        malformed: fields with values of a wrong type, which no road takes; what a null
            means is for transformers to say.
        ignored: fields without effect, in transformers too.
    """

    config: Values
    table: Mapping[str, Field]
    faults: list[str] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def get(self, name: str) -> Any:
        """Returns a field's value, or its default where the config leaves it out.

        `null` counts as left out where the default is derived.
        """
        default = self.table[name].default
        value = self.config.get(name)
        is_derived = isinstance(default, Derived)
        if value is not None or (name in self.config and not is_derived):
            return value
        return default.value(self.get) if isinstance(default, Derived) else default

    def attributes(self) -> Values:
        """Collects the attributes that all fields of the table set."""
        merged: dict[str, object] = {}
        for name, entry in self.table.items():
            value = self.get(name)
            fault = entry.fault(value)
            if fault:
                self.faults.append(f"{name} {fault}")
                if value is not None and _type_fault(value, entry.default):
                    self.malformed.append(name)
            else:
                merged |= self._attributes_of(name, entry, value)
        return merged

    def _attributes_of(self, name: str, entry: Field, value: object) -> Values:
        # A transform may fail on values that are wrong only together (a window of 0
        # in windowed layers): its message joins the others, so all are shown at once.
        try:
            return entry.attributes(value, self.get)
        except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
            self.faults.append(f"{name} = {value!r}: {error}")
            return {}

    def account_for_others(
        self, read: Iterable[str], known: KnownFields, ignore: Collection[str]
    ) -> None:
        """Notes every field that is neither in the table nor in `read`.

        What the code of transformers reads is a fault; what it does not know either, or
        what `ignore` names, is ignored. A null states nothing.
        """
        names = {*read, *self.table}
        for name, value in self.config.items():
            if name in names:
                continue
            if name in ignore:
                self.ignored.append(name)
            elif name in known.read and value is not None:
                self.faults.append(
                    f"{name} = {value!r} is read by transformers and not by this road"
                )
            elif name not in known.declared | known.read and value is not None:
                self.ignored.append(name)

    def refuse_others(self) -> None:
        """Notes a fault for every field that is not in the table."""
        self.faults.extend(
            f"{name} = {value!r} is unknown{nearest(name, sorted(self.table))}"
            for name, value in self.config.items()
            if name not in self.table
        )


def build(kind: type, attributes: Values, parts: Mapping[str, type]) -> Any:
    """Builds a nested config dataclass from dotted attributes.

    `parts` names the class of an attribute whose annotation leaves a choice.

    Raises:
        ValueError: an attribute that the classes lack, all of them named, or a value
            that a class refuses.
    """
    nested: dict[str, dict[str, Any]] = {}
    arguments: dict[str, Any] = {}
    for name, value in attributes.items():
        head, _, tail = name.partition(".")
        if tail:
            nested.setdefault(head, {})[tail] = value
        else:
            arguments[head] = value
    names = {f.name for f in fields(kind)}
    lacking = sorted(({*nested, *arguments}) - names)
    if lacking:
        raise ValueError(f"{kind.__name__} has no attribute {', '.join(lacking)}")
    hints = get_type_hints(kind)
    for name, inner in nested.items():
        part = parts.get(name, _only_type(hints[name]))
        # The annotation `MLP | MoE` is ambiguous, and guessing by the attributes would
        # hide a misspelt one.
        if not is_dataclass(part):
            raise ValueError(
                f"{kind.__name__}.{name} may be {part}: the family must name one in "
                "its parts"
            )
        below = {k.removeprefix(name + "."): v for k, v in parts.items()}
        arguments[name] = build(part, inner, below)
    return kind(**arguments)


def _only_type(hint: Any) -> Any:
    """The class of `X | None`; any other annotation as it is."""
    types = [kind for kind in get_args(hint) if kind is not type(None)]
    return types[0] if len(types) == 1 else hint


_GENERATION = """
assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule
num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
repetition_penalty return_dict_in_generate suppress_tokens target_lookbehind temperature
top_k top_p typical_p use_cache
"""

_BOOKKEEPING = """
_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path
architectures attn_implementation auto_map bos_token_id decoder_start_token_id dtype
eos_token_id finetuning_task id2label is_llama_config label2id model_type name_or_path
num_labels output_attentions output_hidden_states pad_token_id prefix problem_type
return_dict sep_token_id task_specific_params tokenizer_class torch_dtype torchscript
transformers.js_config transformers_version unsloth_fixed unsloth_version use_bfloat16
"""

COMMON: Mapping[str, Field] = {
    **{name: Inert() for name in (_GENERATION + _BOOKKEEPING).split()},
    "add_cross_attention": Only(False),
    "chunk_size_feed_forward": Inert(0),
    "cross_attention_hidden_size": Only(None),
    "is_encoder_decoder": Only(False),
    "pruned_heads": Only({}, None),
    "tie_encoder_decoder": Only(False),
}
"""Fields that any config may hold: bookkeeping, and defaults of `generate`."""
