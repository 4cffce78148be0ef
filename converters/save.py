"""Saves variables as a folder that transformers loads.

Tensors, side files and sharding that training did not change keep their bytes. One
tensor at a time is in memory.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from dew.converters.errors import brief
from dew.converters.folder.atomic import write_atomically
from dew.converters.folder.dtypes import convert_checked
from dew.converters.folder.folder import CONFIG
from dew.converters.folder.safetensors import Spec
from dew.converters.folder.weights import FLOATS, SINGLE
from dew.converters.folder.write import copied_files, json_bytes, write_folder
from dew.converters.mapping.table import Piece, rule_path
from dew.converters.model_card import model_card
from dew.converters.pretrained import Pretrained
from dew.processes import ProcessError, agree_process_phase
from dew.tree import flatten, thaw
from dew.typing import Variables

GATHERING = "gathering the variables"
"""Phase in which processes gather variables for an export."""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def export(
    source: Pretrained,
    folder: str | os.PathLike[str],
    variables: Variables | None = None,
    *,
    dtype: DTypeLike | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """Writes a model as a Hugging Face folder, without torch.

    Under several processes all of them call it: sharded variables are gathered one
    tensor at a time, and the first process writes.

    Args:
        source: the model whose config, side files and layout are written.
        folder: the folder to write; it appears when it is complete.
        variables: trained variables; None writes the source's own.
        dtype: dtype of all floating-point tensors; None keeps each stored dtype.
        max_shard_size: bytes of a weight file, or "5GB"; None keeps the source's files.
        overwrite: whether an existing folder is replaced.
        check: called with the finished folder before it gets its name; may raise.

    Raises:
        ValueError: the variables are not the source's in number and shape, a value does
            not fit the stored dtype, or the folder is taken.
    """
    export = Export(
        source=source,
        variables=source.variables if variables is None else variables,
        dtype=None if dtype is None else np.dtype(dtype),
    )
    export.check_variables()
    shards = export.shards(bytes_of(max_shard_size))
    target = Path(folder).expanduser().absolute()
    with gathering():
        if jax.process_index():
            # Gathering a sharded variable takes every process.
            for names in shards.values():
                for name in names:
                    export.values(name)
            return target
        with write_atomically(target, overwrite=overwrite) as partial:
            export.write(partial, shards)
            if check is not None:
                check(partial)
    return target


@dataclass(frozen=True, kw_only=True)
class Export:
    """One export: a source, the variables to write and their dtype."""

    source: Pretrained
    variables: Variables
    dtype: np.dtype | None = None

    @cached_property
    def _leaves(self) -> dict[Any, Any]:
        return flatten(thaw(self.variables))

    @cached_property
    def _original(self) -> dict[Any, Any]:
        return flatten(self.source.variables)

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Name, dtype and shape of every tensor, in the order of the source's files."""
        weights, ties = self.source.folder.weights, self.source.ties
        shapes = {n: s for n, s in weights.shapes().items() if n not in ties.dropped}
        origins = {name: name for name in shapes} | dict(ties.borrowed)
        return {
            name: Spec(
                name=name,
                dtype=self._dtype(origin),
                shape=weights.entries[origin].shape,
            )
            for name, origin in origins.items()
        }

    def _dtype(self, name: str) -> np.dtype:
        """Returns the dtype a tensor is written in; untrained buffers keep theirs."""
        weights = self.source.folder.weights
        is_weight = weights.entries[name].dtype in FLOATS
        is_known = name in self.source.table.sources
        return (
            self.dtype
            if self.dtype is not None and is_weight and is_known
            else weights.dtype(name)
        )

    @property
    def is_trained(self) -> bool:
        """Whether any variable differs from the source's."""
        return any(
            leaf is not self._original.get(path) for path, leaf in self._leaves.items()
        )

    @property
    def keeps_bytes(self) -> bool:
        """Whether the tensors have the source's names and dtypes."""
        weights = self.source.folder.weights
        stored = {name: weights.dtype(name) for name in weights.entries}
        return stored == {name: spec.dtype for name, spec in self.specs.items()}

    def check_variables(self) -> None:
        """Raises unless the variables have the source's paths and shapes."""
        expected = self.source.table.variables
        lost = [rule_path(path) for path in expected if path not in self._leaves]
        extra = [rule_path(path) for path in self._leaves if path not in expected]
        other = [
            f"{rule_path(path)} is {list(np.shape(leaf))}, the source's is "
            f"{list(expected[path])}"
            for path, leaf in self._leaves.items()
            if path in expected and np.shape(leaf) != expected[path]
        ]
        faults = [f"missing: {line}" for line in brief(lost)]
        faults += [f"unexpected: {line}" for line in brief(extra)] + other
        if faults:
            raise ValueError(
                f"the variables are not those of {self.source.address}: "
                f"{'; '.join(faults)}"
            )

    def values(self, name: str) -> np.ndarray:
        """Returns the values of one tensor, gathered onto the host."""
        weights = self.source.folder.weights
        pieces = self.source.table.sources.get(name, ())
        changed = any(
            self._leaves[p.target] is not self._original.get(p.target) for p in pieces
        )
        if changed:
            stored = self.source.table.write(name, self._piece)
        else:
            stored = weights.view(self.source.ties.borrowed.get(name, name))
        return convert_checked(name, stored, self.specs[name].dtype)

    def _piece(self, piece: Piece) -> np.ndarray:
        leaf = self._leaves[piece.target]
        if piece.entry is None:
            return on_host(leaf)
        return _entry_on_host(leaf, piece.axis, piece.entry)

    def shards(self, limit: int | None) -> dict[str, list[str]]:
        """Returns the tensors of each file: the source's, or of `limit` bytes."""
        if limit is not None:
            return _split_by_size(self.specs, limit)
        files = self.source.folder.weights.files
        file_of = {name: file for file, names in files.items() for name in names}
        file_of |= {new: file_of[old] for new, old in self.source.ties.borrowed.items()}
        return {
            file: [name for name in self.specs if file_of[name] == file]
            for file in files
        }

    def write(self, folder: Path, shards: Mapping[str, Sequence[str]]) -> None:
        """Writes the export's files into an empty folder; `shards` are by file."""
        source = self.source.folder
        files: dict[str, Path | bytes] = {**copied_files(source.path)}
        if self.is_trained:
            files["README.md"] = model_card(self.source, self.specs).encode()
        write_folder(
            folder,
            {file: [self.specs[n] for n in names] for file, names in shards.items()},
            self.values,
            config=self._config(),
            side_files=files,
            index=self._index(shards),
            metadata=source.weights.metadata,
            release=self._release,
        )

    def _release(self, name: str) -> None:
        """Frees the memory of the stored tensor behind one that has been written."""
        weights = self.source.folder.weights
        if name in weights.entries:
            weights.release(name)

    def _index(self, shards: Mapping[str, Sequence[str]]) -> bytes | None:
        """Returns the index: the source's where it still holds, None for one file."""
        weights = self.source.folder.weights
        if list(shards) == [SINGLE]:
            return None
        is_same = list(shards) == list(weights.files) and self.keeps_bytes
        if weights.index is not None and is_same:
            return weights.index
        files = {name: file for file, names in shards.items() for name in names}
        specs = self.specs.values()
        metadata = {
            "total_parameters": sum(int(np.prod(spec.shape)) for spec in specs),
            "total_size": sum(spec.size_bytes for spec in specs),
        }
        index = {"metadata": metadata, "weight_map": dict(sorted(files.items()))}
        return (json.dumps(index, indent=2) + "\n").encode()

    def _config(self) -> bytes:
        text = (self.source.folder.path / CONFIG).read_bytes()
        edits = dict(self.source.ties.edits)
        if self.dtype is not None:
            known = self.source.folder.config
            named = [name for name in ("dtype", "torch_dtype") if name in known]
            edits |= dict.fromkeys(named or ["dtype"], self.dtype.name)
        config = json.loads(text)
        if all(config.get(name) == value for name, value in edits.items()):
            return text
        return json_bytes(config | edits)


@contextmanager
def gathering() -> Iterator[None]:
    """Runs a block in which processes gather variables, and in which one may fail.

    `on_host` agrees before it gathers, and so does the block at its end: whoever fails
    on the way, the others hear of it in place of waiting for the next variable.

    Raises:
        ProcessError: the block failed in another process.
    """
    fault: BaseException | None = None
    try:
        yield
    except ProcessError:
        raise
    except BaseException as raised:
        fault = raised
    agree_process_phase(GATHERING, fault)


def on_host(leaf: Any) -> np.ndarray:
    """Returns an array as numpy; without a copy if one CPU device holds all of it.

    An array that other processes hold parts of is gathered from them: all call it,
    within `gathering`. From other devices a copy of the array is fetched: jax caches
    fetched values with their array, which would add up to the whole model.
    """
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if not leaf.is_fully_addressable:
        agree_process_phase(GATHERING)
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    devices = leaf.devices()
    is_host = len(devices) == 1 and next(iter(devices)).platform == "cpu"
    return np.asarray(leaf if is_host else jnp.copy(leaf))


def _entry_on_host(leaf: Any, axis: int, entry: int) -> np.ndarray:
    """Returns one entry of an axis, as `on_host` does.

    An array on several devices is read shard by shard: indexing it would put the whole
    entry on each of them.
    """
    before = (slice(None),) * axis
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        agree_process_phase(GATHERING)
    is_apart = isinstance(leaf, jax.Array) and leaf.is_fully_addressable
    if not (is_apart and len(leaf.devices()) > 1):
        return on_host(leaf[(*before, entry)])
    entry_values = np.empty(leaf.shape[:axis] + leaf.shape[axis + 1 :], leaf.dtype)
    for shard in leaf.addressable_shards:
        start, stop, _ = shard.index[axis].indices(leaf.shape[axis])
        if start <= entry < stop:
            place = shard.index[:axis] + shard.index[axis + 1 :]
            entry_values[place] = np.asarray(shard.data[(*before, entry - start)])
    return entry_values


def _split_by_size(specs: Mapping[str, Spec], limit: int) -> dict[str, list[str]]:
    """Splits tensors into files of at most `limit` bytes, or of one larger tensor."""
    files: list[list[str]] = [[]]
    room = limit
    for name, spec in specs.items():
        if files[-1] and spec.size_bytes > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= spec.size_bytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {
        f"model-{i:05d}-of-{len(files):05d}.safetensors": names
        for i, names in enumerate(files, 1)
    }


def bytes_of(size: int | str | None) -> int | None:
    """Returns a size such as "5GB" in bytes; None stays None.

    Raises:
        ValueError: the text is no size.
    """
    if size is None or type(size) is int:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B?)\s*", str(size).upper())
    unit = match.group(2) if match else "?"
    if match is None or unit not in _UNITS:
        raise ValueError(f'max_shard_size must be bytes or like "5GB", got {size!r}')
    return int(float(match.group(1)) * _UNITS[unit])
