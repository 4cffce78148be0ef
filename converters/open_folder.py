"""From an address to a folder on this machine, fetched where it lies elsewhere."""

import os
from pathlib import Path

from dew.converters.folder.cache import made_from
from dew.converters.folder.fetch import HUB_ID, from_hub, from_url
from dew.converters.gguf.convert import write_model


def local_folder(address: str | os.PathLike[str]) -> Path:
    """Returns the folder that an address names, fetched first if it lies elsewhere.

    An address is a folder, `hf://org/name` or `org/name` with `@revision` where wanted,
    or a URL of any file system that fsspec knows (`gs://bucket/model`). Any of them may
    name a .gguf file instead: it stands for the folder made of it, in the cache.

    Raises:
        ValueError: there is no such folder.
    """
    path = _local(os.fspath(address))
    if path.is_dir():
        return path
    if path.suffix != ".gguf":
        raise ValueError(
            f"{os.fspath(address)} is a file; a model is the folder that holds it, or "
            "a .gguf file"
        )
    return made_from([path], "gguf", lambda partial: write_model(path, partial))


def _local(text: str) -> Path:
    """The folder or file of an address, here."""
    path = Path(text).expanduser()
    if path.exists():
        return path.resolve() if path.is_dir() else path.absolute()
    if text.startswith("hf://"):
        return from_hub(text.removeprefix("hf://").removeprefix("models/"), text)
    if "://" in text:
        return from_url(text)
    if HUB_ID.fullmatch(text):
        return from_hub(text, text)
    raise ValueError(f"there is no folder {text}")
