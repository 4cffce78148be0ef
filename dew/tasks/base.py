"""The protocol of inference tasks: a model source and the variables to use."""

from typing import Protocol, runtime_checkable

from dew.source import Source
from dew.typing import Variables


@runtime_checkable
class Task(Protocol):
    """A trained model ready for use: the source it came from, and its weights now.

    `dew.save` writes a task as a folder of safetensors.
    """

    @property
    def source(self) -> Source:
        """The model, its tokenizer and, of a loaded one, the folder it came from."""
        ...

    @property
    def variables(self) -> Variables:
        """The weights to use; after training they differ from the source's."""
        ...
