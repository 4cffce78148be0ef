"""A Hugging Face folder as a value: config, tokenizer, side files and weights."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dew.converters.folder.weights import Weights, read_weights, weight_map

CONFIG = "config.json"
GENERATION = "generation_config.json"
CERTIFICATE = "certificate.json"
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


@dataclass(frozen=True, kw_only=True)
class Folder:
    """What one folder holds. Weights are headers until a tensor is looked at.

    `address` is what the user called it, a hub id say; `path` is where it lies here.
    """

    path: Path
    address: str
    config: Mapping[str, Any]
    weights: Weights

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """generation_config.json, empty where there is none."""
        return _json_of(self.path / GENERATION)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of tokenizer.json, None where there is none."""
        file = self.path / "tokenizer.json"
        return Tokenizer.from_file(str(file)) if file.exists() else None

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja text, from its own file or from inside tokenizer_config.json."""
        file = self.path / "chat_template.jinja"
        if file.exists():
            return file.read_text(encoding="utf-8")
        template = _json_of(self.path / "tokenizer_config.json").get("chat_template")
        if type(template) is not list:
            return template
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The token ids that end a text, as generation_config says, else the config."""
        ids = self.generation_config.get(
            "eos_token_id", self.config.get("eos_token_id")
        )
        if ids is None:
            return ()
        return tuple(ids) if type(ids) is list else (ids,)

    @property
    def side_files(self) -> list[str]:
        """Every file that is neither weights nor a certificate, by relative path."""
        return side_files(self.path)


def side_files(path: Path) -> list[str]:
    """Every file of a folder that is neither weights nor a certificate.

    Hidden files and folders do not count; they are caches, mostly.
    """
    found = []
    for base, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(base).relative_to(path)
        found += [str(inside / name) for name in sorted(names) if _is_side(name)]
    return found


def _is_side(name: str) -> bool:
    return not (
        name.startswith(".") or name.endswith(_WEIGHT_SUFFIXES) or name == CERTIFICATE
    )


Unpickle = Callable[[Path], Path]
"""Gives a folder with the tensors of another one's pickles; see `dew.bridges`."""


def read_folder(path: Path, address: str, unpickle: Unpickle | None = None) -> Folder:
    """Reads a folder's config and the headers of its weights.

    `unpickle` is asked where the only weights are pickles, which take torch to read.

    Raises:
        ValueError: it is no Hugging Face folder, or its weights are in a form that this
            package does not read; the message says what is there and what to do.
    """
    path = _export_of_run(path)
    if not (path / CONFIG).exists():
        held = sorted(file.name for file in path.iterdir())[:8]
        gguf = [name for name in held if name.endswith(".gguf")]
        advice = f". Name a GGUF file itself: {address}/{gguf[0]}" if gguf else ""
        raise ValueError(
            f"{address} is no Hugging Face folder: it has no {CONFIG}; it holds "
            f"{', '.join(held) or 'nothing'}{advice}"
        )
    config = _json_of(path / CONFIG)
    _refuse_quantised(config, address)
    weights = read_weights(path)
    if weights is None and unpickle is not None and bin_files(path):
        weights = read_weights(unpickle(path))
    if weights is None:
        raise ValueError(f"{address} has no weights that can be read: {_other(path)}")
    return Folder(path=path, address=address, config=config, weights=weights)


def bin_files(path: Path) -> list[Path]:
    """The pickled weight files that count in a folder; the index names its shards.

    Raises:
        ValueError: there are two sets of them.
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


def _other(path: Path) -> str:
    if bin_files(path):
        return (
            f"only {BIN}, a pickle, which takes torch to read: dew.load turns it into "
            "safetensors, or save it once with transformers' save_pretrained"
        )
    return "no model.safetensors and no model.safetensors.index.json"


def _export_of_run(path: Path) -> Path:
    """A run of ours stands for the model it exported."""
    if not (path / "run.json").exists() or (path / CONFIG).exists():
        return path
    if not (path / "export" / CONFIG).exists():
        raise ValueError(
            f"{path} is a run without an export; make one: dew export {path} FOLDER"
        )
    return path / "export"


def _refuse_quantised(config: Mapping[str, Any], address: str) -> None:
    quantisation = config.get("quantization_config")
    if quantisation:
        method = dict(quantisation).get("quant_method", "an unnamed method")
        raise ValueError(
            f"{address} is quantised ({method}): its tensors are no plain weights. "
            "Load the unquantised checkpoint, dequantise it (dew.load with dequantise="
            "True for float8 and mxfp4, else in transformers, and save that), or use "
            "it as a live teacher"
        )


def _json_of(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if type(value) is not dict:
        raise ValueError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value
