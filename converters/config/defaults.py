"""Defaults derived from other fields: which layer is of which kind, which head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dew.converters.config.fields import Derived, Field, Lookup, Values
from dew.converters.config.transforms import FULL, WINDOWED


@dataclass(frozen=True)
class _PerLayer(Derived):
    """A default with one entry for each layer."""

    @property
    def kind(self) -> type:
        """Type of a stated value: a list with one entry for each layer."""
        return list


@dataclass(frozen=True)
class LayerTypes(_PerLayer):
    """Full attention in every `pattern`-th layer, a sliding window in the others.

    `pattern` is a number or the name of the field that holds it.
    """

    pattern: int | str

    def value(self, get: Lookup) -> list[str]:
        """Type of attention in each layer."""
        every = get(self.pattern) if isinstance(self.pattern, str) else self.pattern
        return [
            FULL if every and (i + 1) % every == 0 else WINDOWED
            for i in range(get("num_hidden_layers"))
        ]


@dataclass(frozen=True)
class LeadingFull(_PerLayer):
    """Full attention in layer 0 and each n-th after it; the field `every` has n."""

    every: str

    def value(self, get: Lookup) -> list[str]:
        """Type of attention in each layer."""
        layers = range(get("num_hidden_layers"))
        return [WINDOWED if i % get(self.every) else FULL for i in layers]


@dataclass(frozen=True)
class LateWindows(_PerLayer):
    """Sliding windows, if used, in all layers from number `max_window_layers` on."""

    def value(self, get: Lookup) -> list[str]:
        """Type of attention in each layer."""
        is_used = get("use_sliding_window") and get("sliding_window") is not None
        first = get("max_window_layers")
        return [
            WINDOWED if is_used and i >= first else FULL
            for i in range(get("num_hidden_layers"))
        ]


@dataclass(frozen=True)
class EarlyWindows(_PerLayer):
    """Sliding windows, if used, in even layers below number `max_window_layers`."""

    def value(self, get: Lookup) -> list[str]:
        """Type of attention in each layer."""
        first = get("max_window_layers") if get("use_sliding_window") else 0
        return [
            WINDOWED if i % 2 == 0 and i < first else FULL
            for i in range(get("num_hidden_layers"))
        ]


@dataclass(frozen=True)
class RopeLayers(_PerLayer):
    """Rotary embedding in all but each n-th layer; the field `interval` has n."""

    interval: str

    def value(self, get: Lookup) -> list[int]:
        """For each layer 1 if it has a rotary embedding, 0 if not."""
        every = get(self.interval)
        return [int((i + 1) % every != 0) for i in range(get("num_hidden_layers"))]


@dataclass(frozen=True)
class NoRopeWindows(_PerLayer):
    """Sliding windows, if used, in the layers without rotary embedding.

    The field `rope_layers` has 1 for each layer with a rotary embedding.
    """

    rope_layers: str

    def value(self, get: Lookup) -> list[str]:
        """Type of attention in each layer."""
        is_used = get("use_sliding_window") and get("sliding_window") is not None
        return [
            FULL if not is_used or has_rope else WINDOWED
            for has_rope in get(self.rope_layers)
        ]


@dataclass(frozen=True)
class HeadClasses(Field):
    """The field `architectures`, whose first class name chooses the model's head.

    Each class has the attributes that it sets; one that is `Derived` is computed from
    other fields. A config that names no class has the first one here.
    """

    classes: Mapping[str, Values]

    @property
    def default(self) -> list[str]:
        """List of the first class name alone."""
        return [next(iter(self.classes))]

    def _class_name(self, value: Any) -> str:
        return (value or self.default)[0]

    def fault(self, value: object) -> str | None:
        """Refuses a class that the family does not have."""
        if self._class_name(value) in self.classes:
            return None
        return f"must be one of {', '.join(self.classes)}, got {value!r}"

    def attributes(self, value: object, get: Lookup) -> Values:
        """Attributes that the chosen class sets."""
        return {
            to: part.value(get) if isinstance(part, Derived) else part
            for to, part in self.classes[self._class_name(value)].items()
        }


@dataclass(frozen=True)
class NumLabels(Derived):
    """Number of labels of a classifier, counted from the names in `id2label`."""

    def value(self, get: Lookup) -> int:
        """Number of names in `id2label`, or `num_labels` if there are none."""
        return len(get("id2label") or ()) or get("num_labels")


@dataclass(frozen=True)
class Pooling(Derived):
    """Pooling of a sequence into one vector, by `classifier_pooling`."""

    def value(self, get: Lookup) -> str:
        """Our name of the pooling that `classifier_pooling` names."""
        names = {"cls": "first", "mean": "mean"}
        pooling = get("classifier_pooling")
        if pooling not in names:
            raise ValueError(
                f"classifier_pooling must be one of {', '.join(names)}, got {pooling!r}"
            )
        return names[pooling]
