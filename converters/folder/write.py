"""Writes the files of a Hugging Face folder: weights, side files and config.json.

Every writer of folders goes through `write_folder`: exports, pruned and extended
models, dequantised copies and conversions from GGUF.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from dew.converters.folder.folder import CONFIG, side_files
from dew.converters.folder.safetensors import Spec, write_file
from dew.converters.folder.weights import INDEX


def write_folder(
    folder: Path,
    specs: Mapping[str, Sequence[Spec]],
    values: Callable[[str], np.ndarray],
    *,
    config: bytes,
    side_files: Mapping[str, Path | bytes],
    index: bytes | None = None,
    metadata: Mapping[str, Mapping[str, str]] | None = None,
    release: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes a model's files into an empty folder, one tensor at a time.

    The tokenizer is a side file: like every file given by its path it is copied byte
    for byte, so transformers reads exactly what the source's authors wrote. The folder
    is usually one of `write_atomically`, or the cache's, and gets its name later.

    Args:
        folder: an existing, empty folder.
        specs: the tensors of each weight file, by the file's name.
        values: returns a tensor's values by its name.
        config: the text of config.json.
        side_files: other files by relative path: their bytes, or a path to copy.
        index: the text of model.safetensors.index.json; None writes none.
        metadata: strings for the header of each weight file, beside its format.
        release: called with each tensor's name after it is written.
    """
    for file, tensors in specs.items():
        # transformers refuses safetensors files whose header lacks the format.
        strings = {**(metadata or {}).get(file, {}), "format": "pt"}
        write_file(folder / file, tensors, values, strings, release)
    if index is not None:
        _write(folder / INDEX, index)
    for name, content in side_files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _write(folder / name, content)
    # Last, since a folder without config.json is not taken for a model: what is cut
    # short is never loaded.
    _write(folder / CONFIG, config)


def copied_files(source: Path) -> dict[str, Path]:
    """Returns a folder's side files but config.json, to be copied by `write_folder`."""
    return {name: source / name for name in side_files(source) if name != CONFIG}


def json_bytes(content: Mapping[str, object]) -> bytes:
    """Returns JSON indented by two spaces, as transformers writes it."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _write(file: Path, content: Path | bytes) -> None:
    if isinstance(content, Path):
        shutil.copyfile(content, file)
    else:
        file.write_bytes(content)
    # Files of the hub's cache may be readable by their owner alone.
    os.chmod(file, 0o644)
