"""Safetensors files: headers and whole files by the package, large tensors by hand.

`safetensors` opens a file, checks its header and says what is in it, and writes arrays
that are in memory. Three things it cannot do are done here:

- Tensors are views of the mapped file. Its `get_tensor` copies each of them: 0.9 s
  and 2.0 GiB at the peak for 1 GiB in bfloat16, where views that are freed once used
  take 0.4 s and 1.0 GiB. For numpy it has no float8 either.
- Data begins at a multiple of 64 bytes, from where XLA's CPU uses it in place: the same
  1 GiB in 0.01 s and no second copy. Its writer pads headers to 8.
- A model is written one tensor at a time. Its writer wants all of them in memory.
"""

import itertools
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
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dew.converters.folder.header_faults import header_faults

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

_BITS: Mapping[str, int] = {
    **{name: 8 * dtype.itemsize for name, dtype in DTYPES.items()},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    "C64": 64,
}
"""Bits of an element, also of dtypes that are not read but stand between others."""


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
    try:
        with safe_open(file, framework="np") as opened:
            metadata = opened.metadata() or {}
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
        tensors = [
            (name, piece.get_dtype(), tuple(piece.get_shape()))
            for name, piece in slices.items()
        ]
        sizes = [math.prod(shape) * _BITS[dtype] // 8 for _, dtype, shape in tensors]
    # A later safetensors may read dtypes that the table of sizes lacks.
    except (SafetensorError, KeyError) as refusal:
        return Header(faults=header_faults(file, refusal, _BITS))
    with file.open("rb") as stream:
        first = 8 + int.from_bytes(stream.read(8), "little")
    # An open file does not tell where its tensors are. The format has no gaps, so each
    # begins where the one before it ends.
    starts = [first, *(first + size for size in itertools.accumulate(sizes))]
    entries = [
        Entry(name=name, file=file, dtype=dtype, shape=shape, start=start, end=end)
        for (name, dtype, shape), (start, end) in zip(
            tensors, itertools.pairwise(starts), strict=True
        )
    ]
    return Header(entries=tuple(entries), metadata=metadata)


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


def write_arrays(
    file: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes arrays that are in memory as one safetensors file.

    Args:
        file: the file to write.
        tensors: the arrays by name, in any memory order.
        metadata: strings for the header.
    """
    # safetensors 0.8 writes the memory of an array whose axes are transposed under the
    # shape of the transposed one.
    ordered = {name: np.require(x, requirements="C") for name, x in tensors.items()}
    save_file(ordered, file, metadata=dict(metadata))
    os.chmod(file, 0o644)


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
