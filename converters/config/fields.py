"""Accounting for a config: every field is used, known to change nothing, or refused.

A family's table says for each field of its Hugging Face config what becomes of it:
`Use` puts its value into our config, `Read` leaves it to other fields that read it,
`Inert` knows that it changes no logit, `Only` accepts the values that change none. A
field the table does not know is refused by name. Defaults are those of the transformers
class, which counts where a config.json says nothing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol, get_args, get_type_hints, runtime_checkable

from dew.converters.errors import nearest

Values = Mapping[str, Any]


@runtime_checkable
class Derived(Protocol):
    """A default that depends on other fields."""

    @property
    def kind(self) -> type:
        """What values of the field are."""
        return int

    def of(self, get: Callable[[str], Any]) -> Any:
        """Works the default out; `get` returns another field's value."""
        ...


@dataclass(frozen=True)
class Same(Derived):
    """The value of another field, as num_key_value_heads defaults to the heads."""

    name: str

    def of(self, get: Callable[[str], Any]) -> Any:
        """The other field's value."""
        return get(self.name)


@dataclass(frozen=True)
class Quotient(Derived):
    """One field divided by another, as head_dim defaults to width over heads."""

    dividend: str
    divisor: str

    def of(self, get: Callable[[str], Any]) -> Any:
        """The whole quotient."""
        return get(self.dividend) // get(self.divisor)


@dataclass(frozen=True)
class Product(Derived):
    """One field times a number, as an MLP defaults to 4 times the width."""

    name: str
    factor: int

    def of(self, get: Callable[[str], Any]) -> Any:
        """The product."""
        return get(self.name) * self.factor


@runtime_checkable
class Field(Protocol):
    """What becomes of one field."""

    @property
    def default(self) -> Any:
        """Its value where the config says nothing: a constant or a `Derived`."""
        ...

    def fault(self, value: Any) -> str | None:
        """Says why a value cannot be accepted."""
        ...

    def puts(self, value: Any, get: Callable[[str], Any]) -> Values:
        """Returns what the field contributes: dotted attributes and their values."""
        ...


@dataclass(frozen=True)
class Use:
    """The field is `read(value, *values of beside)` in the attributes `to` (dotted).

    `among` lists the values there are, where they can be listed; `nullable` says that
    null is a value.
    """

    to: str | tuple[str, ...]
    default: Any
    read: Callable[..., Any] | None = None
    beside: tuple[str, ...] = ()
    among: Collection[Any] = ()
    nullable: bool = False

    def fault(self, value: Any) -> str | None:
        """Checks the kind of value against that of the default, and the value."""
        if self.among and value not in self.among:
            listed = ", ".join(repr(known) for known in self.among)
            return f"must be one of {listed}, got {value!r}"
        if value is None and self.nullable:
            return None
        return _kind_fault(value, self.default)

    def puts(self, value: Any, get: Callable[[str], Any]) -> Values:
        """The value, read, under each attribute."""
        if self.read is not None:
            value = self.read(value, *(get(name) for name in self.beside))
        targets = (self.to,) if type(self.to) is str else self.to
        return dict.fromkeys(targets, value)


@dataclass(frozen=True, init=False)
class MultiUse:
    """One field that several parts of our config read, each in its own way."""

    uses: tuple[Use, ...]

    def __init__(self, *uses: Use) -> None:
        object.__setattr__(self, "uses", uses)

    @property
    def default(self) -> Any:
        """That of the first."""
        return self.uses[0].default

    def fault(self, value: Any) -> str | None:
        """What the first says."""
        return self.uses[0].fault(value)

    def puts(self, value: Any, get: Callable[[str], Any]) -> Values:
        """What all of them put."""
        put: dict[str, Any] = {}
        for use in self.uses:
            put |= use.puts(value, get)
        return put


@dataclass(frozen=True)
class Read:
    """The field has no place of its own; ropes or other fields read it."""

    default: Any = None
    nullable: bool = False

    def fault(self, value: Any) -> str | None:
        """Checks the kind of value against that of the default."""
        if value is None and self.nullable:
            return None
        return _kind_fault(value, self.default)

    def puts(self, value: Any, get: Callable[[str], Any]) -> Values:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class Inert:
    """No value of the field changes what the model computes."""

    default: Any = None

    def fault(self, value: Any) -> str | None:
        """Accepts everything."""
        return None

    def puts(self, value: Any, get: Callable[[str], Any]) -> Values:
        """Nothing."""
        return {}


@dataclass(frozen=True, init=False)
class Only:
    """The values that change nothing; the first is the default, others are refused."""

    accepted: tuple[Any, ...]

    def __init__(self, *accepted: Any) -> None:
        object.__setattr__(self, "accepted", accepted)

    @property
    def default(self) -> Any:
        """The first accepted value."""
        return self.accepted[0]

    def fault(self, value: Any) -> str | None:
        """Refuses what is not listed."""
        if any(_equal(value, accepted) for accepted in self.accepted):
            return None
        listed = " or ".join(repr(a) for a in self.accepted)
        return f"must be {listed} on the native road, got {value!r}"

    def puts(self, value: Any, get: Callable[[str], Any]) -> Values:
        """Nothing."""
        return {}


def _equal(value: Any, accepted: Any) -> bool:
    return value == accepted and (type(value) is bool) == (type(accepted) is bool)


def _kind_fault(value: Any, default: Any) -> str | None:
    """Says when a value is of another kind than its default."""
    kinds = {bool: (bool,), int: (int,), float: (float, int), str: (str,)}
    wanted = kinds.get(type(default))
    if isinstance(default, Derived):
        wanted = (default.kind,)
    if wanted is None or type(value) in wanted:
        return None
    return f"must be a {wanted[0].__name__}, got {value!r}"


@dataclass(kw_only=True)
class Reading:
    """One config being read: values by name, and the faults found on the way."""

    config: Values
    table: Mapping[str, Field]
    faults: list[str] = field(default_factory=list)

    def get(self, name: str) -> Any:
        """Returns a field's value, its default where the config says nothing.

        `null` counts as nothing where the default is derived.
        """
        default = self.table[name].default
        value = self.config.get(name)
        is_derived = isinstance(default, Derived)
        if value is not None or (name in self.config and not is_derived):
            return value
        return default.of(self.get) if isinstance(default, Derived) else default

    def attributes(self) -> dict[str, Any]:
        """Collects what every field of the table contributes."""
        found: dict[str, Any] = {}
        for name, known in self.table.items():
            value = self.get(name)
            fault = known.fault(value)
            if fault:
                self.faults.append(f"{name} {fault}")
            else:
                found |= self._puts(name, known, value)
        return found

    def _puts(self, name: str, known: Field, value: Any) -> Values:
        try:
            return known.puts(value, self.get)
        except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
            self.faults.append(f"{name} = {value!r}: {error}")
            return {}

    def refuse_unknown(self, known: Iterable[str], ignored: Sequence[str]) -> None:
        """Notes every field that nobody knows."""
        names = {*known, *self.table}
        for name, value in self.config.items():
            if name not in names and name not in ignored:
                near = nearest(name, sorted(names))
                self.faults.append(f"{name} = {value!r} is unknown{near}")


def build(kind: type, attributes: Values, parts: Mapping[str, type]) -> Any:
    """Builds a nested config dataclass from dotted attributes.

    `parts` says which class an attribute is where its annotation leaves a choice.

    Raises:
        ValueError: an attribute that the classes lack, all of them named, or a value
            that a class refuses.
    """
    nested: dict[str, dict[str, Any]] = {}
    given: dict[str, Any] = {}
    for name, value in attributes.items():
        head, _, tail = name.partition(".")
        if tail:
            nested.setdefault(head, {})[tail] = value
        else:
            given[head] = value
    known = {f.name for f in fields(kind)}
    lost = sorted(({*nested, *given}) - known)
    if lost:
        raise ValueError(f"{kind.__name__} has no attribute {', '.join(lost)}")
    hints = get_type_hints(kind)
    for name, inner in nested.items():
        part = parts.get(name, _only_kind(hints[name]))
        if not is_dataclass(part):
            raise ValueError(
                f"{kind.__name__}.{name} may be {part}: the family must say which in "
                "its parts"
            )
        below = {k.removeprefix(name + "."): v for k, v in parts.items()}
        given[name] = build(part, inner, below)
    return kind(**given)


def _only_kind(hint: Any) -> Any:
    """The class of `X | None`, and of anything else itself."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else hint


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
"""Fields that every config may hold: bookkeeping, and defaults of `generate`."""
