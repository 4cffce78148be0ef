"""Folders made from files in other forms: once, and again where the files change."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dew.converters.folder.atomic import staged

_MARKS = ".made-from.json"
_FORM = 1
"""Goes up when what is made of the same files becomes another."""


def cache_folder() -> Path:
    """Where fetched and made folders are kept: $DEW_CACHE, else the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(os.environ.get("DEW_CACHE", Path(base) / "dew"))


def made_from(files: Sequence[Path], kind: str, make: Callable[[Path], None]) -> Path:
    """Returns the folder that `make` fills from the files, one for each set of them.

    It is made anew where a file's size or time of change is another than when it was
    made. It appears when complete; of several processes one makes it and the others
    wait.
    """
    named = "\0".join([kind, *(str(file.resolve()) for file in files)])
    key = hashlib.sha256(named.encode()).hexdigest()[:16]
    folder = cache_folder() / kind / f"{files[0].stem}-{key}"
    marks = json.dumps([_FORM, *([s.st_size, s.st_mtime_ns] for s in _stats(files))])
    with _alone(folder.with_name(f".{folder.name}.lock")):
        note = folder / _MARKS
        if note.exists() and note.read_text() == marks:
            return folder
        with staged(folder, overwrite=True) as partial:
            make(partial)
            (partial / _MARKS).write_text(marks)
    return folder


def _stats(files: Sequence[Path]) -> list[os.stat_result]:
    return [file.stat() for file in files]


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Keeps other processes out; the system lets go when this one ends."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
