"""The weight files of a folder: its tensors, and the file that each is in.

Where there is an index it decides: shards that it does not name are stale and are not
opened. Contradictions are collected as faults, for one error at the end.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from dew.converters.errors import brief
from dew.converters.folder.safetensors import (
    DTYPES,
    Entry,
    Header,
    MappedFile,
    read_header,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_HASH_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The tensors of a folder by name; each is read on first use.

    `entries` are in the order of the files and of the bytes in them. `index` is the
    index file's text where there is one.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    index: bytes | None = None
    _maps: dict[Path, MappedFile] = field(default_factory=dict, repr=False)

    @property
    def files(self) -> dict[str, list[str]]:
        """The names of the tensors in each file."""
        files: dict[str, list[str]] = {name: [] for name in self.metadata}
        for name, entry in self.entries.items():
            files[entry.file.name].append(name)
        return files

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def dtype(self, name: str) -> np.dtype:
        """The stored dtype of a tensor."""
        return DTYPES[self.entries[name].dtype]

    def view(self, name: str) -> np.ndarray:
        """Returns a tensor as a read-only view of its file."""
        return self._map(name).view(self.entries[name])

    def release(self, name: str) -> None:
        """Frees the memory pages of a tensor that has been read."""
        self._map(name).release(self.entries[name])

    def _map(self, name: str) -> MappedFile:
        file = self.entries[name].file
        if file not in self._maps:
            self._maps[file] = MappedFile(file)
        return self._maps[file]

    @cached_property
    def content_hash(self) -> str:
        """sha256 of all names, dtypes, shapes and bytes, however they are sharded."""
        digest = hashlib.sha256()
        for name in sorted(self.entries):
            entry = self.entries[name]
            digest.update(f"{name}\0{entry.dtype}\0{list(entry.shape)}\0".encode())
            data = self.view(name).reshape(-1).view(np.uint8)
            for start in range(0, len(data), _HASH_CHUNK_BYTES):
                digest.update(data[start : start + _HASH_CHUNK_BYTES].data)
            self.release(name)
        return digest.hexdigest()


def read_weights(folder: Path) -> Weights | None:
    """Reads the headers of a folder's safetensors files; None where it has none.

    Raises:
        ValueError: the folder holds files, and nothing decides which of them count; or
            some are damaged, and the message lists all faults of their headers.
    """
    single, index = folder / SINGLE, folder / INDEX
    if index.exists():
        return _read_index(folder, index.read_bytes())
    if single.exists():
        return _join(read_headers([single]), {})
    stray = sorted(file.name for file in folder.glob("*.safetensors"))
    stray = [name for name in stray if not name.startswith("adapter_")]
    if stray:
        raise ValueError(
            f"{folder} holds {', '.join(stray)} but neither {SINGLE} nor {INDEX}, "
            "which would say which of them count; restore the index, or rename a "
            f"single complete file to {SINGLE}"
        )
    return None


def _read_index(folder: Path, text: bytes) -> Weights:
    placed = weight_map(folder / INDEX)
    if SINGLE not in placed.values() and (folder / SINGLE).exists():
        raise ValueError(
            f"{folder} holds both {SINGLE} and an {INDEX} that does not name it; "
            "transformers would read the first, the index names others. Remove the "
            "one that is stale"
        )
    names = dict.fromkeys(placed.values())
    headers = read_headers([folder / n for n in names if (folder / n).exists()])
    faults = []
    for name in names:
        if name not in headers:
            lost = [tensor for tensor, file in placed.items() if file == name]
            faults.append(f"{INDEX} names {name}, which is missing: {_few(lost)}")
    joined = _join(headers, placed)
    return Weights(
        entries=joined.entries,
        metadata=joined.metadata,
        faults=(*faults, *joined.faults),
        index=text,
    )


def read_headers(files: Sequence[Path]) -> dict[str, Header]:
    """Reads the headers of files of one folder, by name.

    Raises:
        ValueError: a file is damaged. What else may be wrong with the folder is not
            known then: a damaged file's tensors are neither there nor missing.
    """
    headers = {file.name: read_header(file) for file in files}
    faults = [fault for header in headers.values() for fault in header.faults]
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise ValueError(
            f"{files[0].parent} has damaged files; fetch or write them anew:{lines}"
        )
    return headers


def weight_map(index: Path) -> dict[str, str]:
    """Returns the file of each tensor, by an index.

    Raises:
        ValueError: the index has no such map, or names files in other folders.
    """
    try:
        placed = json.loads(index.read_bytes())["weight_map"]
        names = set(placed.values())
        outside = sorted(name for name in names if name != Path(name).name)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} has no weight_map: {error!r}") from error
    if outside:
        raise ValueError(f"{index} must name files beside it, got {', '.join(outside)}")
    return placed


def _join(headers: Mapping[str, Header], placed: Mapping[str, str]) -> Weights:
    """Joins the tensors of all files; `placed` is the index's file of each tensor."""
    faults = []
    copies_of: dict[str, list[Entry]] = {}
    for header in headers.values():
        for entry in header.entries:
            copies_of.setdefault(entry.name, []).append(entry)
    for name, copies in copies_of.items():
        files = [entry.file.name for entry in copies]
        if len(set(files)) > 1:
            faults.append(f"doubled: {name} is in {' and in '.join(files)}")
        elif placed and name not in placed:
            faults.append(f"{name} is in {files[0]}, but {INDEX} does not name it")
        elif placed and placed[name] != files[0]:
            faults.append(
                f"{INDEX} places {name} in {placed[name]}, but it is in {files[0]}"
            )
    for name in headers:
        # A tensor that another file has is a fault of its own, reported above.
        lost = [t for t, file in placed.items() if file == name and t not in copies_of]
        if lost:
            faults.append(f"{INDEX} places in {name} what is not there: {_few(lost)}")
    return Weights(
        entries={name: copies[0] for name, copies in copies_of.items()},
        metadata={name: header.metadata for name, header in headers.items()},
        faults=tuple(faults),
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(brief(names))


def unreadable(weights: Weights, names: Iterator[str] | Sequence[str]) -> list[str]:
    """Lists the tensors whose dtypes hold packed or integer numbers, with advice."""
    faults = []
    for name in names:
        dtype = weights.entries[name].dtype
        if dtype not in FLOATS:
            packed = dtype.startswith(("F8", "F4", "F6")) or dtype in ("I8", "U8")
            advice = (
                "quantised; load the unquantised checkpoint, or dequantise it in "
                "transformers and save that"
                if packed
                else f"weights are one of {', '.join(FLOATS)}"
            )
            faults.append(f"dtype: {name} is {dtype}: {advice}")
    return faults


FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that weights may have."""
