"""The safetensors format: a JSON header, then the bytes of every tensor.

Headers are checked before any tensor is read, and tensors are views of the mapped file.

The `safetensors` package is not used, for three reasons. Its writer needs all tensors
in memory; this one streams one at a time. It aligns data to 8 bytes, and XLA's CPU uses
a host array without a copy only at a multiple of 64. Its reader stops at the first
fault of a header; this one collects all of them for one message.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""Dtypes that are read, by their names in the format."""

NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

ALIGNMENT = 64
_MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Place of one tensor in a file: from byte `start` up to byte `end`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Header:
    """Contents of one file by its header, in byte order, and the header's faults.

    Entries of dtypes that are not in `DTYPES` are included; `unreadable` of
    `dew.converters.folder.weights` lists them where they are needed.
    """

    entries: tuple[Entry, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


def read_header(file: Path) -> Header:
    """Reads and checks the header of one safetensors file, without its tensors."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little") if size >= 8 else -1
        if length < 0 or length > min(size - 8, _MOST_HEADER_BYTES):
            return Header(faults=(_length_fault(file, length, size),))
        text = stream.read(length)
    try:
        pairs = json.loads(text, object_pairs_hook=list)
        described = [(name, dict(facts)) for name, facts in pairs]
    except (UnicodeDecodeError, ValueError, TypeError) as error:
        return Header(faults=(f"{file.name}: the header is not JSON objects: {error}",))
    metadata = dict(described).get("__metadata__", {})
    tensors = [pair for pair in described if pair[0] != "__metadata__"]
    faults = _repeated_names(file, [name for name, _ in tensors])
    entries = []
    for name, facts in tensors:
        fault = _shape_fault(facts)
        if fault:
            faults.append(f"{file.name}: {name} {fault}")
            continue
        start, end = (8 + length + offset for offset in facts["data_offsets"])
        entries.append(
            Entry(
                name=name,
                file=file,
                dtype=facts["dtype"],
                shape=tuple(facts["shape"]),
                start=start,
                end=end,
            )
        )
    entries.sort(key=lambda entry: (entry.start, entry.end))
    if not faults:
        faults = _layout_faults(file, entries, 8 + length, size)
    return Header(entries=tuple(entries), metadata=metadata, faults=tuple(faults))


def _length_fault(file: Path, length: int, size: int) -> str:
    fault = f"{file.name} is no safetensors file: {size} bytes hold no header"
    if length <= _MOST_HEADER_BYTES and length > size - 8:
        return f"{fault} of the {length} bytes it announces; it was cut short"
    return fault


def _repeated_names(file: Path, names: Sequence[str]) -> list[str]:
    repeated = sorted({name for name in names if names.count(name) > 1})
    return [f"{file.name} names {name} twice" for name in repeated]


def _is_counts(numbers: Any, count: int | None = None) -> bool:
    return (
        type(numbers) is list
        and all(type(n) is int and n >= 0 for n in numbers)
        and (count is None or len(numbers) == count)
    )


def _shape_fault(facts: Mapping[str, Any]) -> str | None:
    """Returns the fault of one tensor's record, regardless of the others."""
    dtype, shape, offsets = (facts.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not (type(dtype) is str and _is_counts(shape) and _is_counts(offsets, 2)):
        return f"is not described by dtype, shape and two offsets: {dict(facts)}"
    if shape is None or offsets is None or dtype not in DTYPES:
        return None
    size = math.prod(shape) * DTYPES[dtype].itemsize
    span = offsets[1] - offsets[0]
    if span != size:
        return f"is {dtype}{shape}, {size} bytes, but its offsets span {span}"
    return None


def _layout_faults(
    file: Path, entries: Sequence[Entry], start: int, size: int
) -> list[str]:
    """Lists overlaps, gaps, and tensors that reach past the end of the file."""
    faults = []
    at = start
    for entry in entries:
        if entry.start != at:
            kind = (
                "overlaps the tensor before it" if entry.start < at else "leaves a gap"
            )
            faults.append(
                f"{file.name}: {entry.name} {kind}: it starts at byte {entry.start}, "
                f"expected {at}"
            )
        at = max(at, entry.end)
    if at > size:
        faults.append(
            f"{file.name} is cut short: its tensors end at byte {at}, it at {size}"
        )
    elif at < size:
        faults.append(f"{file.name} has {size - at} bytes that belong to no tensor")
    return faults


class MappedFile:
    """A memory-mapped file, of which only the pages in use are in memory."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self, entry: Entry) -> np.ndarray:
        """Returns the tensor as a read-only view; its bytes are read on first use."""
        dtype = DTYPES[entry.dtype]
        if not entry.size_bytes:
            return np.zeros(entry.shape, dtype)
        count = entry.size_bytes // dtype.itemsize
        flat = np.frombuffer(self._map, dtype, count, entry.start)
        return flat.reshape(entry.shape)

    def release(self, entry: Entry) -> None:
        """Frees the memory pages of this tensor alone; a later access reads them again.

        Without it a mapped checkpoint that was copied counts twice in the process's
        memory.
        """
        page = mmap.PAGESIZE
        start, end = -(-entry.start // page) * page, entry.end // page * page
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Name, dtype and shape of a tensor that is to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(
    file: Path,
    specs: Iterable[Spec],
    values: Callable[[str], np.ndarray],
    metadata: Mapping[str, str],
    release: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes one safetensors file, holding one tensor at a time in memory.

    Tensors whose size is a multiple of 64 bytes come first, so that as many as possible
    are aligned to it.

    Args:
        file: the file to write.
        specs: names, dtypes and shapes of the tensors.
        values: returns a tensor's values by its name.
        metadata: strings for the header.
        release: called with each tensor's name after it is written.
    """
    ordered = sorted(
        specs,
        key=lambda spec: (
            spec.size_bytes % ALIGNMENT != 0,
            -spec.dtype.itemsize,
            spec.name,
        ),
    )
    with file.open("wb") as stream:
        stream.write(_header_bytes(ordered, metadata))
        for spec in ordered:
            array = np.asarray(values(spec.name))
            actual = (array.dtype, array.shape)
            assert actual == (spec.dtype, spec.shape), (spec, actual)
            flat = np.ascontiguousarray(array).reshape(-1)
            stream.write(flat.view(np.uint8).data)
            # Otherwise this tensor stays in memory while the next one is computed.
            del array, flat
            release(spec.name)
    os.chmod(file, 0o644)


def _header_bytes(specs: Sequence[Spec], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.size_bytes],
        }
        at += spec.size_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
