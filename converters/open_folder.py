"""Opens an address: a folder, a run, a hub id, a URL or a GGUF file.

The only module that distinguishes these. It returns a folder on this machine.
"""

import os
from pathlib import Path

from dew.converters.folder.cache import cached_folder
from dew.converters.folder.dequantize import dequantise_folder
from dew.converters.folder.fetch import HUB_ID, download_hub, download_url
from dew.converters.folder.folder import CONFIG, Folder, Unpickle, is_adapter
from dew.converters.gguf.convert import write_model
from dew.runs import RunFolder

Address = str | os.PathLike[str] | Folder
"""A path, hub id or URL, or a folder that is open already."""


def open_folder(
    address: Address, *, dequantise: bool = False, unpickle: Unpickle | None = None
) -> Folder:
    """Returns the folder that an address names, downloaded or converted if need be.

    An address is a folder, a run's folder, `hf://org/name` or `org/name` with
    an optional `@revision`, or a URL of any file system that fsspec supports
    (`gs://bucket/model`). A run's folder gives its export. A .gguf file at any of
    these places is converted to a folder in the cache. A `Folder` is returned as it is.

    Args:
        address: the path, hub id or URL; a `~` is expanded.
        dequantise: whether a quantised folder is replaced by its plain copy, for the
            formats of `dew.converters.folder.dequantize`.
        unpickle: reads pickled weights if there are only those; None refuses them.

    Raises:
        ValueError: the address names nothing, or a file other than a .gguf, or a run
            without an export.
    """
    if isinstance(address, Folder):
        return address
    text = os.fspath(address)
    path = _local_path(text)
    if path.is_dir():
        path = _find_export(path)
    elif path.suffix == ".gguf":
        path = cached_folder([path], "gguf", lambda folder: write_model(path, folder))
    else:
        raise ValueError(
            f"{text} is a file; a model is the folder that holds it, or a .gguf file"
        )
    path = dequantise_folder(path) if dequantise else path
    return Folder(path=path, address=text, unpickle=unpickle)


def _local_path(text: str) -> Path:
    """Returns the folder or file of an address on this machine."""
    path = Path(text).expanduser()
    if path.exists():
        return path.resolve() if path.is_dir() else path.absolute()
    if text.startswith("hf://"):
        return download_hub(text.removeprefix("hf://").removeprefix("models/"), text)
    if "://" in text:
        return download_url(text)
    if HUB_ID.fullmatch(text):
        return download_hub(text, text)
    raise ValueError(f"there is no folder {text}")


def _find_export(path: Path) -> Path:
    """Returns the export of a run's folder; any other folder as it is."""
    run = RunFolder(path)
    if not run.is_run or (path / CONFIG).exists():
        return path
    if not ((run.export / CONFIG).exists() or is_adapter(run.export)):
        raise ValueError(
            f"{path} is a run without an export; make one: dew export {path} FOLDER"
        )
    return run.export
