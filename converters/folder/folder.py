"""An opened Hugging Face folder: config, tokenizer, side files and weights."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dew.converters.folder.json_files import read_json
from dew.converters.folder.tokenizer import read_tokenizer, special_id
from dew.converters.folder.weights import (
    Weights,
    read_headers,
    read_weights,
    weight_map,
)
from dew.runs import CERTIFICATE

CONFIG = "config.json"
GENERATION = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"

_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".ckpt",
    ".index.json",
)


Unpickle = Callable[[Path], Path]
"""Writes the tensors of a folder's pickles as safetensors, and returns their folder.

Reading pickles takes torch, so the function comes from `dew.bridges`.
"""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """An opened Hugging Face folder: config, tokenizer, side files and weights.

    `dew.converters.open_folder.open_folder` makes one from any address. Each file is
    read when its property is first used; of weights the headers alone, until a tensor
    is viewed.
    """

    path: Path
    """The folder on this machine."""
    address: str
    """The address as the user wrote it: a path, a hub id or a URL."""
    unpickle: Unpickle | None = field(default=None, repr=False, compare=False)
    """Reads pickled weights where there are no others; None refuses them."""

    @property
    def is_adapter(self) -> bool:
        """Whether the folder holds a PEFT adapter and no model."""
        return is_adapter(self.path)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The fields of the model's config.json.

        Raises:
            ValueError: there is no config.json, so this is not a model's folder.
        """
        if not (self.path / CONFIG).exists():
            names = sorted(file.name for file in self.path.iterdir())[:8]
            gguf = [name for name in names if name.endswith(".gguf")]
            advice = (
                f". Name a GGUF file itself: {self.address}/{gguf[0]}" if gguf else ""
            )
            raise ValueError(
                f"{self.address} is not a Hugging Face folder: it has no {CONFIG}; it "
                f"holds {', '.join(names) or 'nothing'}{advice}"
            )
        return read_json(self.path / CONFIG)

    @cached_property
    def weights(self) -> Weights:
        """The stored tensors by name; an adapter's, where the folder holds one.

        Raises:
            ValueError: the weights are quantised, missing or in a form that this
                package does not read; the message names them and the remedy.
        """
        if self.is_adapter:
            return _adapter_weights(self.path)
        _refuse_quantised(self.config, self.address)
        weights = read_weights(self.path)
        if weights is None and self.unpickle is not None and bin_files(self.path):
            weights = read_weights(self.unpickle(self.path))
        if weights is None:
            raise ValueError(
                f"{self.address} has no weights that can be read: {_others(self.path)}"
            )
        return weights

    @cached_property
    def adapter_config(self) -> Mapping[str, Any]:
        """The fields of adapter_config.json; empty where the file is absent."""
        return read_json(self.path / ADAPTER_CONFIG)

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The fields of generation_config.json; empty where the file is absent."""
        return read_json(self.path / GENERATION)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the folder; None where it has no tokenizer.json.

        Without truncation and padding, whatever tokenizer.json stores of either.

        Raises:
            ValueError: the file is no tokenizer.
        """
        return read_tokenizer(self.path)

    @cached_property
    def chat_template(self) -> str | None:
        """The chat template's Jinja text; None where there is none.

        From chat_template.jinja, else from tokenizer_config.json.
        """
        file = self.path / "chat_template.jinja"
        if file.exists():
            return file.read_text(encoding="utf-8")
        template = read_json(self.path / "tokenizer_config.json").get("chat_template")
        if type(template) is not list:
            return template
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids of the end-of-text tokens: all of a list, the preferred one first."""
        return self._special_ids("eos_token")

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that begin a text."""
        return self._special_ids("bos_token")

    def _special_ids(self, name: str) -> tuple[int, ...]:
        """Returns the ids that generation_config.json states for a special token.

        Else those of config.json, else that of the token that the tokenizer's settings
        name.
        """
        for fields in (self.generation_config, self.config):
            ids = fields.get(f"{name}_id")
            if ids is not None:
                return tuple(ids) if type(ids) is list else (ids,)
        token = special_id(self.path, self.tokenizer, name)
        return () if token is None else (token,)

    @property
    def side_files(self) -> list[str]:
        """Relative paths of all files other than weights and the certificate."""
        return side_files(self.path)


def side_files(path: Path) -> list[str]:
    """Relative paths of a folder's files other than weights and the certificate.

    Hidden files and folders are left out; most are caches.
    """
    files = []
    for base, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(base).relative_to(path)
        files += [str(inside / name) for name in sorted(names) if _is_side(name)]
    return files


def _is_side(name: str) -> bool:
    return not (
        name.startswith(".") or name.endswith(_WEIGHT_SUFFIXES) or name == CERTIFICATE
    )


def is_adapter(path: Path) -> bool:
    """Whether a folder holds a PEFT adapter and no model."""
    return (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).exists()


def _adapter_weights(path: Path) -> Weights:
    file = path / ADAPTER_WEIGHTS
    if not file.exists():
        names = ", ".join(sorted(file.name for file in path.iterdir()))
        raise ValueError(
            f"{path} has no {ADAPTER_WEIGHTS}; it holds {names}. Load a pickled "
            "adapter in PEFT and save it anew, which writes safetensors"
        )
    header = read_headers([file])[ADAPTER_WEIGHTS]
    return Weights(
        entries={entry.name: entry for entry in header.entries},
        metadata={ADAPTER_WEIGHTS: header.metadata},
    )


def bin_files(path: Path) -> list[Path]:
    """Returns the pickled weight files of a folder; with an index, those it names.

    Raises:
        ValueError: the folder holds two sets of them.
    """
    index = path / BIN_INDEX
    if not index.exists():
        return [path / BIN] if (path / BIN).exists() else []
    placed = weight_map(index)
    if (path / BIN).exists() and BIN not in placed.values():
        raise ValueError(
            f"{path} holds both {BIN} and an {BIN_INDEX} that does not name it; remove "
            "the one that is stale"
        )
    return sorted({path / name for name in placed.values()})


def _others(path: Path) -> str:
    if bin_files(path):
        return (
            f"only {BIN}, a pickle, which takes torch to read: dew.load turns it into "
            "safetensors, or save it once with transformers' save_pretrained"
        )
    return "no model.safetensors and no model.safetensors.index.json"


def _refuse_quantised(config: Mapping[str, Any], address: str) -> None:
    quantisation = config.get("quantization_config")
    if quantisation:
        method = dict(quantisation).get("quant_method", "an unnamed method")
        raise ValueError(
            f"{address} is quantised ({method}): its tensors are not plain weights. "
            "Load the unquantised checkpoint, dequantise it (dew.load with dequantise="
            "True for float8 and mxfp4, else in transformers, and save that), or use "
            "it as a live teacher"
        )
