"""What every inference task is."""

from typing import Protocol, runtime_checkable

from dew.source import Source
from dew.typing import Variables


@runtime_checkable
class Task(Protocol):
    """A trained model put to use: where it came from, and the weights it uses now.

    Saving a task is the way out to safetensors.
    """

    @property
    def source(self) -> Source:
        """The model, tokenizer and, if it was loaded, the folder it came from."""
        ...

    @property
    def variables(self) -> Variables:
        """The weights to use, which may have moved since the source was loaded."""
        ...
