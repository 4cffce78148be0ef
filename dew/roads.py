"""The short way in and out: `dew.load` and `dew.save`."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from dew.converters.exporting import export
from dew.converters.loading import Shardings, load_native
from dew.converters.pretrained import Pretrained
from dew.converters.ties import Tied
from dew.source import Source
from dew.typing import Variables


@runtime_checkable
class Saveable(Protocol):
    """A task that `pipeline()` returned, or what `load` returned."""

    @property
    def source(self) -> Source:
        """What it was built on."""
        ...

    @property
    def variables(self) -> Variables | None:
        """The variables it runs with."""
        ...


def load(
    address: str | os.PathLike[str],
    *,
    dtype: Any = None,
    road: Literal["auto", "native"] = "auto",
    shardings: Shardings | None = None,
    tied: Tied | None = None,
    ignore_fields: Sequence[str] = (),
) -> Pretrained:
    """Loads a pretrained model from a folder, a hub id, a URL or a run of ours.

    See `dew.converters.loading.load_native` for what the arguments mean.
    """
    return load_native(
        address,
        dtype=dtype,
        shardings=shardings,
        tied=tied,
        ignore_fields=ignore_fields,
    )


def save(
    task: Saveable,
    folder: str | os.PathLike[str],
    variables: Variables | None = None,
    *,
    dtype: Any = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Writes a task or a loaded model as a folder that transformers loads.

    Config, tokenizer and side files are those of the folder it was loaded from. See
    `dew.converters.exporting.export` for what the arguments mean.

    Raises:
        TypeError: the model came from no folder, so there is no config to write.
    """
    source = task.source
    if not isinstance(source, Pretrained):
        raise TypeError(
            f"dew.save needs a model that dew.load returned, got a "
            f"{type(source).__name__}: it has no folder whose config, tokenizer and "
            "layout an export could keep"
        )
    return export(
        source,
        folder,
        task.variables if variables is None else variables,
        dtype=dtype,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        check=check,
    )
