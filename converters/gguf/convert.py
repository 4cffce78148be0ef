"""Hugging Face folders from GGUF files: the one place that reads GGUF.

The `gguf` package parses the file and dequantises; the tables in
`dew.converters.gguf.architectures` have the place of each tensor and of each piece of
metadata. What no table accounts for is refused by name, since llama.cpp would use it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from dew.converters.config.fields import Values
from dew.converters.folder.atomic import write_atomically
from dew.converters.folder.safetensors import Spec
from dew.converters.folder.weights import SINGLE
from dew.converters.folder.write import json_bytes, write_folder
from dew.converters.gguf.config import (
    GGUFFile,
    architecture,
    at_block,
    config_from_metadata,
    exists,
    floats,
    names_at,
)
from dew.converters.gguf.rows import Arch, Fuse, HeadCounts, TensorRow
from dew.converters.gguf.tokenizer import tokenizer_files

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

DTYPES: Mapping[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}


def folder_from_gguf(
    path: str | Path, out: str | Path, *, dtype: str = "float32"
) -> Path:
    """Writes the model in a .gguf file as a folder that transformers loads.

    Weights are dequantised one tensor at a time and stored in `dtype`. The folder
    appears under its name only when complete.

    Raises:
        ValueError: the file is not GGUF, holds an architecture, a tokenizer, metadata
            or tensors that no table here accounts for, or `out` exists.
    """
    out = Path(out).absolute()
    with write_atomically(out) as partial:
        write_model(path, partial, dtype=dtype)
    return out


def write_model(path: str | Path, folder: Path, *, dtype: str = "float32") -> None:
    """Writes the files of `folder_from_gguf` into an existing, empty folder."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = GGUFFile(_reader(Path(path)))
    arch = architecture(source)
    config = config_from_metadata(source, arch)
    slots = _slots(source, arch, config)
    source.check_all_read()
    stored = np.dtype(DTYPES[dtype])
    write_folder(
        folder,
        {SINGLE: [Spec(name=n, dtype=stored, shape=s.shape) for n, s in slots.items()]},
        lambda name: _cast(name, slots[name].load(), stored),
        config=json_bytes({**config, "torch_dtype": dtype}),
        side_files=_side_files(source, config),
    )


def _reader(path: Path) -> "GGUFReader":
    try:
        import gguf
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "reading GGUF needs the gguf package: pip install 'dew-bridge[gguf]'"
        ) from missing
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it starts with {magic!r}")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as fault:
        raise ValueError(
            f"{path} cannot be read as GGUF, perhaps it was cut short: {fault}"
        ) from fault


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A GGUF tensor's part in one stored tensor.

    `index` selects one of the stacked experts; only that one is dequantised.
    """

    tensor: "ReaderTensor"
    row: TensorRow
    heads: HeadCounts
    index: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part in transformers' layout."""
        shape = [int(size) for size in reversed(self.tensor.shape)]
        # One byte broadcast to the shape: layouts run on it without reading weights.
        stand_in = np.broadcast_to(np.int8(0), shape[self.index is not None :])
        return self.row.layout(stand_in, self.heads).shape

    def load(self) -> np.ndarray:
        """Returns the dequantised weights in transformers' layout."""
        data = self.tensor.data if self.index is None else self.tensor.data[self.index]
        return self.row.layout(floats(self.tensor, data), self.heads)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One stored tensor and the GGUF tensors that it is made of."""

    parts: tuple[TensorPart, ...]

    @property
    def _fuse(self) -> Fuse:
        return self.parts[0].row.fuse or Fuse(axis=0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor, all parts together."""
        return self._fuse.shape([part.shape for part in self.parts])

    def load(self) -> np.ndarray:
        """Returns the dequantised weights of all parts together."""
        loaded = [part.load() for part in self.parts]
        return loaded[0] if len(loaded) == 1 else self._fuse.join(loaded)


def _slots(source: GGUFFile, arch: Arch, config: Values) -> dict[str, Slot]:
    """Matches tensors with rows, or names every one without a partner."""
    heads = source.get("attention.head_count")
    counts = HeadCounts(heads, source.get("attention.head_count_kv", heads))
    places = _places(arch, config, source.get("block_count"))
    weights = {tensor.name: tensor for tensor in source.weights()}
    faults = [f"{name} is missing" for name in places if name not in weights]
    faults += [f"{name} is unknown" for name in weights if name not in places]
    if faults:
        raise ValueError(f"tensors of {source.name}: " + ", ".join(faults))
    parts: dict[str, tuple[TensorPart, ...]] = {}
    for name, (row, to) in places.items():
        for stored, part in _parts(weights[name], row, to, counts).items():
            parts[stored] = (*parts.get(stored, ()), part)
    return {stored: Slot(parts=sources) for stored, sources in parts.items()}


def _places(
    arch: Arch, config: Values, blocks: int
) -> dict[str, tuple[TensorRow, str]]:
    """Row of every GGUF tensor, and the name of the stored tensor."""
    return {
        name: (row, at_block(row.to, index) + stored)
        for stem, row in arch.rows.items()
        for suffix, stored, flag in (
            (".weight", row.suffixes[0], row.weight),
            (".bias", row.suffixes[1], row.bias),
        )
        if exists(flag, config)
        for index, name in enumerate(names_at(stem + suffix, blocks))
        if row.in_block(index, config)
    }


def _parts(
    tensor: "ReaderTensor", row: TensorRow, to: str, heads: HeadCounts
) -> dict[str, TensorPart]:
    indices = range(int(tensor.shape[-1])) if "{e}" in to else [None]
    return {
        to.replace("{e}", str(index)): TensorPart(
            tensor=tensor, row=row, heads=heads, index=index
        )
        for index in indices
    }


def _cast(name: str, weights: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = weights.astype(dtype)
    if dtype == np.float16 and np.isinf(cast).any() and np.isfinite(weights).all():
        raise ValueError(
            f"{name} reaches {np.abs(weights).max():.6g}, beyond float16's 65504; "
            "store bfloat16 or float32"
        )
    return cast


def _side_files(source: GGUFFile, config: Values) -> dict[str, Path | bytes]:
    length = source.get("context_length")
    ids = {
        key: value
        for key, value in config.items()
        if key.endswith("_token_id") and value is not None
    }
    # A chat model ends a turn with another token than it ends a text with.
    ends = [
        source.metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("eos", "eot", "eom")
    ]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    if len(ends) > 1:
        ids["eos_token_id"] = ends
    tokenizer = tokenizer_files(source.metadata, length=length)
    return {
        "generation_config.json": json_bytes({"_from_model_config": True, **ids}),
        **{name: text.encode() for name, text in tokenizer.items()},
    }
