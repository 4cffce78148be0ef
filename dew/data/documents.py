"""Files and folders of text as one sequence of documents with random access."""

import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast, overload

import numpy as np
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from dew.data.formats import KINDS, RawFile, TextFile

_KIND_NAMES = ", ".join(KINDS)


class Documents(Sequence[str]):
    """The documents of a list of files, in order; made by `open_documents`.

    Only the byte span of each document is in memory, 16 bytes each. `files` names the
    files read; `skipped` names the other files of the folders.
    """

    def __init__(
        self, files: Sequence[TextFile], *, skipped: Sequence[str] = ()
    ) -> None:
        self._files = tuple(files)
        self._ends = np.cumsum([len(file.spans) for file in files])
        self.skipped = tuple(skipped)

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files read, in order."""
        return tuple(file.name for file in self._files)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        place = int(np.searchsorted(self._ends, at, side="right"))
        file = self._files[place]
        return file.read(at - int(self._ends[place]) + len(file.spans))

    def __repr__(self) -> str:
        return f"Documents({len(self)} in {len(self._files)} files)"


def open_documents(
    *addresses: str | os.PathLike[str], text_field: str = "text"
) -> Documents:
    """Opens .txt, .jsonl and .parquet files, or folders of them, as documents.

    A .txt file is one document; a line of .jsonl and a row of .parquet are one each,
    with the text under `text_field`. Any may be gzipped (`.jsonl.gz`). An address may
    be any that fsspec opens (`s3://…`, `hf://…`). Folders are read recursively, in the
    order of the names, without hidden files and names that start with `_`.

    Files without random access (remote, gzipped, parquet) are copied into the system's
    temporary folder, as plain text, for as long as the result lives.

    Raises:
        ValueError: a file cannot be read or holds no text; all faults are named.

    >>> documents = open_documents(TEXTS)
    >>> len(documents) == len(documents.files)
    True
    >>> documents[0].split()[0].startswith("w")
    True
    """
    if not addresses:
        raise ValueError("no data given; name at least one file or folder")
    spool = Path(tempfile.mkdtemp(prefix="dew-documents-"))
    files: list[TextFile] = []
    skipped: list[str] = []
    faults: list[str] = []
    for address in addresses:
        listing = _list_files(os.fspath(address))
        skipped += listing.skipped
        faults += listing.faults
        for path in listing.paths:
            place = spool / str(len(files))
            files.append(_index(listing.filesystem, path, text_field, place))
            faults += files[-1].faults
    if not faults and not any(_has_text(file) for file in files):
        faults = [f"no document has any text in it: {', '.join(map(str, addresses))}"]
    if faults:
        shutil.rmtree(spool)
        raise ValueError("the data cannot be read:\n  " + "\n  ".join(faults))
    documents = Documents(files, skipped=skipped)
    weakref.finalize(documents, shutil.rmtree, spool)
    return documents


def unlistable(*addresses: str | os.PathLike[str]) -> list[str]:
    """Returns why files or folders of text cannot be found, without reading any.

    >>> unlistable("nothing.txt")
    ['nothing.txt does not exist']
    """
    listings = [_list_files(os.fspath(address)) for address in addresses]
    return [fault for listing in listings for fault in listing.faults]


@dataclass(frozen=True, kw_only=True)
class _Listing:
    filesystem: AbstractFileSystem
    paths: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


def _list_files(address: str) -> _Listing:
    """Lists the text files of an address: a file itself, or those below a folder."""
    try:
        filesystem, root = url_to_fs(address)
        if not filesystem.exists(root):
            return _unreadable(address, "does not exist")
        if not filesystem.isdir(root):
            if _kind(root)[0] in KINDS:
                return _Listing(filesystem=filesystem, paths=(root,))
            return _unreadable(address, f"is of no known kind; known: {_KIND_NAMES}")
        inside = [path for path in filesystem.find(root) if not _is_hidden(path, root)]
    except (OSError, ValueError, ImportError) as fault:
        return _unreadable(address, f"cannot be opened: {fault}")
    paths = tuple(path for path in inside if _kind(path)[0] in KINDS)
    skipped = tuple(path for path in inside if _kind(path)[0] not in KINDS)
    if not paths:
        holds = ", ".join(PurePosixPath(path).name for path in skipped[:5])
        return _unreadable(
            address, f"holds no file of {_KIND_NAMES}; it holds {holds or 'nothing'}"
        )
    return _Listing(filesystem=filesystem, paths=paths, skipped=skipped)


def _unreadable(address: str, why: str) -> _Listing:
    return _Listing(filesystem=LocalFileSystem(), faults=(f"{address} {why}",))


def _index(
    filesystem: AbstractFileSystem, path: str, text_field: str, spool: Path
) -> TextFile:
    is_local = isinstance(filesystem, LocalFileSystem)
    name = path if is_local else filesystem.unstrip_protocol(path)
    kind, is_gzipped = _kind(path)
    local = Path(path)
    try:
        if is_gzipped or not is_local:
            local = spool.with_suffix(".copy")
            _copy(filesystem, path, local, is_gzipped)
        raw = RawFile(name=name, path=local, text_field=text_field, spool=spool)
        return KINDS[kind](raw)
    except (OSError, EOFError, zlib.error) as fault:
        return TextFile(
            name=name,
            path=local,
            spans=np.zeros((0, 2), np.int64),
            decode=bytes.decode,
            faults=(f"{name} cannot be read: {fault}",),
        )


def _copy(
    filesystem: AbstractFileSystem, path: str, local: Path, is_gzipped: bool
) -> None:
    compression = "gzip" if is_gzipped else None
    with (
        filesystem.open(path, "rb", compression=compression) as source,
        local.open("wb") as target,
    ):
        shutil.copyfileobj(cast(BinaryIO, source), target)


def _has_text(file: TextFile) -> bool:
    return any(file.read(index) for index in range(len(file.spans)))


def _kind(path: str) -> tuple[str, bool]:
    name = PurePosixPath(path).name.lower()
    plain = name.removesuffix(".gz")
    return PurePosixPath(plain).suffix, plain != name


def _is_hidden(path: str, root: str) -> bool:
    below = PurePosixPath(path).relative_to(PurePosixPath(root.rstrip("/") or "/"))
    return any(part.startswith((".", "_")) for part in below.parts)
