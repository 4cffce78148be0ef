"""Defaults of the fields that say which layer is of which kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dew.converters.config.fields import Derived, Field, Values
from dew.converters.config.transforms import FULL, WINDOWED


@dataclass(frozen=True)
class LayerTypes(Derived):
    """Every `pattern`-th layer attends to all, the others to a window.

    `pattern` is a number or the field that holds it.
    """

    pattern: int | str

    @property
    def kind(self) -> type:
        """A list of names."""
        return list

    def of(self, get: Callable[[str], Any]) -> Any:
        """The type of each layer."""
        every = get(self.pattern) if isinstance(self.pattern, str) else self.pattern
        return [
            FULL if every and (i + 1) % every == 0 else WINDOWED
            for i in range(get("num_hidden_layers"))
        ]


@dataclass(frozen=True)
class LeadingFull(Derived):
    """The first of every so many layers, as the field `every` says, attends to all."""

    every: str

    @property
    def kind(self) -> type:
        """A list of names."""
        return list

    def of(self, get: Callable[[str], Any]) -> Any:
        """The type of each layer."""
        layers = range(get("num_hidden_layers"))
        return [WINDOWED if i % get(self.every) else FULL for i in layers]


@dataclass(frozen=True)
class LateWindows(Derived):
    """The first `max_window_layers` attend to all, the others to a window in use."""

    @property
    def kind(self) -> type:
        """A list of names."""
        return list

    def of(self, get: Callable[[str], Any]) -> Any:
        """The type of each layer."""
        is_used = get("use_sliding_window") and get("sliding_window") is not None
        first = get("max_window_layers")
        return [
            WINDOWED if is_used and i >= first else FULL
            for i in range(get("num_hidden_layers"))
        ]


@dataclass(frozen=True)
class EarlyWindows(Derived):
    """Of the first `max_window_layers` every other has a window in use, from 0 on."""

    @property
    def kind(self) -> type:
        """A list of names."""
        return list

    def of(self, get: Callable[[str], Any]) -> Any:
        """The type of each layer."""
        first = get("max_window_layers") if get("use_sliding_window") else 0
        return [
            WINDOWED if i % 2 == 0 and i < first else FULL
            for i in range(get("num_hidden_layers"))
        ]


@dataclass(frozen=True)
class RopeLayers(Derived):
    """Every so many layers, as the field `interval` says, one does not turn: 0."""

    interval: str

    @property
    def kind(self) -> type:
        """A list of numbers."""
        return list

    def of(self, get: Callable[[str], Any]) -> Any:
        """1 for each layer that turns."""
        every = get(self.interval)
        return [int((i + 1) % every != 0) for i in range(get("num_hidden_layers"))]


@dataclass(frozen=True)
class NoRopeWindows(Derived):
    """Layers that do not turn, by the field `turning`, have a window if one is used."""

    turning: str

    @property
    def kind(self) -> type:
        """A list of names."""
        return list

    def of(self, get: Callable[[str], Any]) -> Any:
        """The type of each layer."""
        is_used = get("use_sliding_window") and get("sliding_window") is not None
        return [
            FULL if not is_used or turns else WINDOWED for turns in get(self.turning)
        ]


@dataclass(frozen=True)
class Heads(Field):
    """`architectures`, whose first name picks the attributes that it puts.

    A value that is `Derived` is worked out of other fields. Where a config names no
    class, the first here counts.
    """

    classes: Mapping[str, Values]

    @property
    def default(self) -> Any:
        """The first class."""
        return [next(iter(self.classes))]

    def fault(self, value: Any) -> str | None:
        """Refuses a class that the family does not have."""
        if (value or self.default)[0] in self.classes:
            return None
        return f"must be one of {', '.join(self.classes)}, got {value!r}"

    def puts(self, value: Any, get: Callable[[str], Any]) -> Values:
        """The attributes of the class."""
        name = (value or self.default)[0]
        return {
            to: part.of(get) if isinstance(part, Derived) else part
            for to, part in self.classes[name].items()
        }


@dataclass(frozen=True)
class NumLabels(Derived):
    """How many labels a classifier has: the names in `id2label` count them."""

    def of(self, get: Callable[[str], Any]) -> Any:
        """The number of names, or `num_labels` without any."""
        return len(get("id2label") or ()) or get("num_labels")


@dataclass(frozen=True)
class Pooling(Derived):
    """How `classifier_pooling` makes one vector of a text."""

    def of(self, get: Callable[[str], Any]) -> Any:
        """Ours for theirs."""
        known = {"cls": "first", "mean": "mean"}
        named = get("classifier_pooling")
        if named not in known:
            raise ValueError(
                f"classifier_pooling must be one of {', '.join(known)}, got {named!r}"
            )
        return known[named]
