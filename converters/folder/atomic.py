"""Folders that appear under their name complete, or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dew.converters.folder.folder import CONFIG
from dew.runs import CERTIFICATE


@contextmanager
def write_atomically(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a hidden sibling folder to write into, renamed to `folder` at the end.

    If the body raises, the sibling is removed and `folder` is as it was.

    Raises:
        ValueError: `folder` exists, is neither empty nor an earlier certified export,
            and `overwrite` is false.
    """
    check_free(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    partial = folder.parent / f".{folder.name}.partial-{mark}"
    partial.mkdir(mode=0o755)
    try:
        yield partial
        _put_in_place(partial, folder, folder.parent / f".{folder.name}.old-{mark}")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _put_in_place(partial: Path, folder: Path, old: Path) -> None:
    if folder.exists():
        folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_free(folder: Path, overwrite: bool) -> None:
    """Refuses to write to a folder that holds anything but an earlier export.

    Raises:
        ValueError: the path is a file, or a folder in use and `overwrite` is false.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(
            f"{folder} is not a folder; choose another name for the export"
        )
    if overwrite or not folder.exists():
        return
    names = sorted(os.listdir(folder))
    is_export = CERTIFICATE in names and CONFIG in names
    if names and not is_export:
        raise ValueError(
            f"{folder} exists and is not an earlier certified export: it holds "
            f"{', '.join(names[:5])}. Choose another folder, or pass overwrite=True"
        )
