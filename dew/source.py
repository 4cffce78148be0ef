"""A model with the variables it starts from: what an objective is built on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxtyping import Array

from dew.typing import Model, Variables

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@runtime_checkable
class Drawable(Protocol):
    """A model that can draw its variables from a key, as flax modules do."""

    def init(self, rngs: Array, inputs: Mapping[str, Array]) -> Variables:
        """New variables, sized by one example batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model, its starting variables if it has any, and its tokenizer.

    `dew.load` returns one that also knows the folder it came from. `Source(model=…)`
    alone is a model to train from nothing: its variables are drawn from a key.

    `eos_ids` end a generated text; `chat_template` is the folder's Jinja text.
    """

    model: Model
    variables: Variables | None = None
    tokenizer: "Tokenizer | None" = None
    chat_template: str | None = None
    eos_ids: tuple[int, ...] = ()
    config: Mapping[str, Any] | None = None

    def draw(self, key: Array, inputs: Mapping[str, Array]) -> Variables:
        """Returns new variables for the model, drawn from `key`.

        Raises:
            TypeError: the model has no initializer, as a lowered one.
        """
        if not isinstance(self.model, Drawable):
            raise TypeError(
                f"{type(self.model).__name__} cannot draw variables from a key; give "
                "Source(variables=…)"
            )
        return self.model.init(key, inputs)
