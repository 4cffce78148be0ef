"""Hugging Face folders from GGUF files: the one place that reads GGUF.

The `gguf` package parses the file and dequantises; the tables in
`dew.converters.gguf_archs` say where each tensor and each piece of metadata goes.
Whatever no table accounts for is refused by name, since llama.cpp would have used it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from dew.converters.gguf_config import (
    Source,
    architecture,
    at_block,
    config_from_metadata,
    floats,
    is_there,
    names_at,
)
from dew.converters.gguf_rows import Arch, Heads, Row
from dew.converters.gguf_tokenizer import tokenizer_files
from dew.converters.staging import staged
from dew.converters.tensors import Spec, write_file
from dew.converters.weights import SINGLE

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
        ValueError: the file is no GGUF, holds an architecture, a tokenizer, metadata or
            tensors that no table here accounts for, or `out` is taken.
    """
    out = Path(out).absolute()
    with staged(out) as partial:
        write_model(path, partial, dtype=dtype)
    return out


def write_model(path: str | Path, folder: Path, *, dtype: str = "float32") -> None:
    """Writes what `folder_from_gguf` does into a folder that is there and empty."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = Source(_reader(Path(path)))
    arch = architecture(source)
    config = config_from_metadata(source, arch)
    slots = _slots(source, arch, config)
    source.check_all_read()
    _write_weights(folder / SINGLE, slots, np.dtype(DTYPES[dtype]))
    for name, content in _side_files(source, config, dtype).items():
        (folder / name).write_text(content, encoding="utf-8")


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
        raise ValueError(f"{path} is no GGUF file: it starts with {magic!r}")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as fault:
        raise ValueError(
            f"{path} cannot be read as GGUF, perhaps it was cut short: {fault}"
        ) from fault


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One tensor to be stored, and where its values come from.

    `index` picks one of the stacked experts, which alone is then dequantised.
    """

    tensor: "ReaderTensor"
    row: Row
    heads: Heads
    shape: tuple[int, ...]
    index: int | None = None

    def load(self) -> np.ndarray:
        """Returns the dequantised weights in transformers' layout."""
        data = self.tensor.data if self.index is None else self.tensor.data[self.index]
        return self.row.layout(floats(self.tensor, data), self.heads)


def _slots(source: Source, arch: Arch, config: Mapping[str, Any]) -> dict[str, Slot]:
    """Matches tensors and rows, or names every tensor that has no partner."""
    heads = source.get("attention.head_count")
    counts = Heads(heads, source.get("attention.head_count_kv", heads))
    blocks = source.get("block_count")
    places = {
        name: (row, at_block(row.to, index) + suffix)
        for stem, row in arch.rows.items()
        for suffix, flag in ((".weight", row.weight), (".bias", row.bias))
        if is_there(flag, config)
        for index, name in enumerate(names_at(stem + suffix, blocks))
    }
    weights = {tensor.name: tensor for tensor in source.weights()}
    faults = [f"{name} is missing" for name in places if name not in weights]
    faults += [f"{name} is unknown" for name in weights if name not in places]
    if faults:
        raise ValueError(f"tensors of {source.name}: " + ", ".join(faults))
    slots: dict[str, Slot] = {}
    for name, tensor in weights.items():
        row, to = places[name]
        slots |= _stored(tensor, row, to, counts)
    return slots


def _stored(tensor: "ReaderTensor", row: Row, to: str, heads: Heads) -> dict[str, Slot]:
    shape = [int(size) for size in reversed(tensor.shape)]
    count = shape.pop(0) if "{e}" in to else None
    # A stand-in of one byte an element: its shape is all that is wanted.
    stored = row.layout(np.broadcast_to(np.int8(0), shape), heads).shape
    return {
        to.replace("{e}", str(index)): Slot(
            tensor=tensor, row=row, heads=heads, shape=stored, index=index
        )
        for index in ([None] if count is None else range(count))
    }


def _write_weights(file: Path, slots: Mapping[str, Slot], dtype: np.dtype) -> None:
    specs = [
        Spec(name=name, dtype=dtype, shape=slot.shape) for name, slot in slots.items()
    ]
    write_file(
        file,
        specs,
        values=lambda name: _cast(name, slots[name].load(), dtype),
        metadata={"format": "pt"},
        written=lambda name: None,
    )


def _cast(name: str, weights: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = weights.astype(dtype)
    if dtype == np.float16 and np.isinf(cast).any() and np.isfinite(weights).all():
        raise ValueError(
            f"{name} reaches {np.abs(weights).max():.6g}, beyond float16's 65504; "
            "store bfloat16 or float32"
        )
    return cast


def _side_files(
    source: Source, config: Mapping[str, Any], dtype: str
) -> dict[str, str]:
    length = source.get("context_length")
    ids = {
        key: value
        for key, value in config.items()
        if key.endswith("_token_id") and value is not None
    }
    # A chat model ends its turn with another token than its text.
    ends = [
        source.metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("eos", "eot", "eom")
    ]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    if len(ends) > 1:
        ids["eos_token_id"] = ends
    return {
        "config.json": _json({**config, "torch_dtype": dtype}),
        "generation_config.json": _json({"_from_model_config": True, **ids}),
        **tokenizer_files(source.metadata, length=length),
    }


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
