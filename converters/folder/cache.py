"""A cache of folders that are converted from other files, until those change."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

from dew.converters.folder.atomic import write_atomically

_MARKS = ".made-from.json"
_FORM = 1
"""Version of the conversions; a higher one makes every entry again."""


def cache_folder() -> Path:
    """Returns the folder of the whole cache: $DEW_CACHE, or in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(os.environ.get("DEW_CACHE", Path(base) / "dew"))


def cached_folder(
    files: Sequence[Path], kind: str, convert: Callable[[Path], None]
) -> Path:
    """Returns the cached folder that `convert` fills from the files.

    It is converted again when a file's size or modification time has changed, and
    appears when complete. Of several processes one converts and the others wait.

    Args:
        files: the source files; each list of them has an entry of its own.
        kind: name of the conversion, and of the sub-folder in the cache.
        convert: writes the result into an empty folder.
    """
    resolved = "\0".join([kind, *(str(file.resolve()) for file in files)])
    key = hashlib.sha256(resolved.encode()).hexdigest()[:16]
    folder = cache_folder() / kind / f"{files[0].stem}-{key}"
    marks = json.dumps([_FORM, *([s.st_size, s.st_mtime_ns] for s in _stats(files))])
    with entry_lock(folder):
        note = folder / _MARKS
        if note.exists() and note.read_text() == marks:
            return folder
        with write_atomically(folder, overwrite=True) as partial:
            convert(partial)
            (partial / _MARKS).write_text(marks)
    return folder


def entry_lock(folder: Path) -> FileLock:
    """Returns the lock on a cache entry; the system frees it when a process dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.with_name(f".{folder.name}.lock"))


def _stats(files: Sequence[Path]) -> list[os.stat_result]:
    return [file.stat() for file in files]
