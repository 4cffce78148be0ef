"""Converts the pickles of `pytorch_model.bin` to safetensors, once, in the cache.

Torch reads them with `weights_only`, which builds tensors and plain containers and
calls nothing that the file names.
"""

import json
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dew.bridges.dtypes import jax_stored
from dew.converters.folder.cache import cached_folder
from dew.converters.folder.folder import BIN, BIN_INDEX, bin_files
from dew.converters.folder.safetensors import NAMES, Spec, write_file
from dew.converters.folder.weights import INDEX, SINGLE, weight_map

_MAPPED_BYTES = 1 << 28
"""Bytes read after which a file is mapped again, or all of it would stay in memory."""


def unpickle(folder: Path) -> Path:
    """Returns a cached folder with a folder's pickled tensors as safetensors.

    All names are preserved; tensors that share memory are written separately. The
    folder contains weights only: config and tokenizer stay where they are.

    Raises:
        ValueError: a file is missing or cut short, or has anything but named tensors.
    """
    files = bin_files(folder)
    lost = [file.name for file in files if not file.exists()]
    if lost:
        raise ValueError(f"{folder / BIN_INDEX} names {', '.join(lost)}, not there")

    def make(partial: Path) -> None:
        for file in files:
            _write(file, partial / _safetensors_name(file.name))
        if (folder / BIN_INDEX).exists():
            placed = weight_map(folder / BIN_INDEX)
            renamed = {name: _safetensors_name(file) for name, file in placed.items()}
            text = json.dumps({"metadata": {}, "weight_map": renamed}, indent=2)
            (partial / INDEX).write_text(text + "\n", encoding="utf-8")

    named = [*files, *folder.glob(BIN_INDEX)]
    return cached_folder(named, "unpickled", make)


def _safetensors_name(name: str) -> str:
    """Returns transformers' name for the safetensors file in place of a pickle."""
    if name == BIN:
        return SINGLE
    return f"{name.removeprefix('pytorch_').removesuffix('.bin')}.safetensors"


def _write(file: Path, target: Path) -> None:
    opened = _Pickle(file)
    write_file(
        target,
        opened.specs(),
        opened.values,
        metadata={"format": "pt"},
        release=lambda name: None,
    )


@dataclass
class _Pickle:
    """One file of named tensors, mapped where its format allows."""

    file: Path
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _seen: int = 0

    def specs(self) -> list[Spec]:
        """Returns name, dtype and shape of each tensor in the file."""
        return [
            Spec(name=name, dtype=self._dtype(name, tensor), shape=tuple(tensor.shape))
            for name, tensor in self._map_tensors().items()
        ]

    def values(self, name: str) -> np.ndarray:
        """Returns one tensor as the C-ordered array that safetensors holds."""
        tensor = self._map_tensors()[name].detach().contiguous()
        self._seen += tensor.nbytes
        flat = tensor.reshape(-1).view(torch.uint8).numpy()
        return flat.view(self._dtype(name, tensor)).reshape(tensor.shape)

    def _map_tensors(self) -> dict[str, torch.Tensor]:
        is_mappable = zipfile.is_zipfile(self.file)
        if not self._tensors or (is_mappable and self._seen > _MAPPED_BYTES):
            self._tensors, self._seen = {}, 0
            self._tensors = _named_tensors(
                self.file, _load_pickle(self.file, mmap=is_mappable)
            )
        return self._tensors

    def _dtype(self, name: str, tensor: torch.Tensor) -> np.dtype:
        dtype = jax_stored(tensor.dtype)
        if dtype not in NAMES:
            raise ValueError(
                f"{self.file}: {name} is {tensor.dtype}; weights are one of "
                f"{', '.join(NAMES.values())}"
            )
        return dtype


def _load_pickle(file: Path, *, mmap: bool) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as refused:
        # Torch's advice around the reason is to read the file without care.
        lines = [line for line in str(refused).splitlines() if line.strip()]
        reason = next(
            (x for x in lines if x.startswith(("Trying", "Unsupp"))), lines[0]
        )
        raise ValueError(
            f"{file} is refused: a pickle is read for tensors by name alone, as "
            f"anything else could run any code; torch says: {reason.strip()!r}. If you "
            "trust where it comes from, load it in torch and save it as safetensors"
        ) from refused
    except (RuntimeError, EOFError, OSError) as broken:
        raise ValueError(
            f"{file} cannot be read, perhaps it was cut short: {broken}"
        ) from broken


def _named_tensors(file: Path, loaded: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors by name.

    Raises:
        ValueError: the file has other objects, or tensors that are not dense.
    """
    if not isinstance(loaded, Mapping):
        raise ValueError(
            f"{file} must hold tensors by name, got {type(loaded).__name__}"
        )
    odd = [
        f"{name!r} is {type(value).__name__}"
        for name, value in loaded.items()
        if type(name) is not str or not _is_dense(value)
    ]
    if odd:
        raise ValueError(
            f"{file} must hold dense tensors by name, and {', '.join(odd[:5])}; load "
            "it in torch and save its state dict alone"
        )
    return dict(loaded)


def _is_dense(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
    )
