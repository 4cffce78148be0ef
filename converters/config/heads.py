"""The field `architectures` of encoders: which class's head stands on the trunk."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dew.converters.config.fields import Derived, Field, Values


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
