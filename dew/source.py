"""A model with the variables it starts from: what an objective is built on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dew.typing import Model, Variables

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
