"""A model with its initial variables and tokenizer, which objectives train."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxtyping import Array

from dew.typing import Model, Variables

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@runtime_checkable
class Drawable(Protocol):
    """A model that can initialise its variables from a key, as flax modules do."""

    def init(self, rngs: Array, inputs: Mapping[str, Array]) -> Variables:
        """Returns new variables, sized by one example batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model, its initial variables if it has any, and its tokenizer.

    `dew.load` returns a `Pretrained`, which adds the folder it was read from.
    `Source(model=…)` alone is a model to train from scratch.
    """

    model: Model
    """The network, as pure functions of its variables."""
    variables: Variables | None = None
    """Initial variables; None means random ones, drawn from a key."""
    tokenizer: "Tokenizer | None" = None
    """The tokenizer; None for models of other inputs than text."""
    chat_template: str | None = None
    """The chat template's Jinja text."""
    eos_ids: tuple[int, ...] = ()
    """Ids of the tokens that end a generated text."""
    config: Mapping[str, Any] | None = None
    """The fields of config.json."""

    def draw(self, key: Array, inputs: Mapping[str, Array]) -> Variables:
        """Returns new variables for the model, initialised from `key`.

        Raises:
            TypeError: the model has no initialiser, as lowered models have none.
        """
        if not isinstance(self.model, Drawable):
            raise TypeError(
                f"{type(self.model).__name__} cannot draw variables from a key; give "
                "Source(variables=…)"
            )
        return self.model.init(key, inputs)
