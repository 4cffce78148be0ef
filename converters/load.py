"""From a folder to a model and its variables: the native road."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from dew.converters.errors import nearest
from dew.converters.families import FAMILIES
from dew.converters.families.base import Family
from dew.converters.folder.dequantize import dequantised
from dew.converters.folder.dtypes import cast
from dew.converters.folder.folder import Folder, Unpickle, read_folder
from dew.converters.folder.weights import Weights, unreadable
from dew.converters.mapping.build import build_table
from dew.converters.mapping.rules import Prefix, template_pattern
from dew.converters.mapping.shapes import variable_shapes
from dew.converters.mapping.table import Index, Table, name_faults
from dew.converters.open_folder import local_folder
from dew.converters.pretrained import Pretrained
from dew.converters.tied_weights import Tied, Ties, settle
from dew.tree import flatten, unflatten
from dew.typing import Path

Shardings = Callable[[Path], jax.sharding.Sharding | None] | Mapping[str, Any]
"""Where each variable goes: a function of its path, or a tree like the variables."""


def load_native(
    address: str | os.PathLike[str],
    *,
    dtype: Any = None,
    shardings: Shardings | None = None,
    tied: Tied | None = None,
    ignore_fields: Sequence[str] = (),
    dequantise: bool = False,
    unpickle: Unpickle | None = None,
) -> Pretrained:
    """Loads a folder, hub id or URL whose architecture is one of `FAMILIES`.

    Tensors stream one at a time to their place; with `shardings` each device is given
    its part and no device holds the whole. On a CPU a tensor that stands on 64 bytes in
    its file is used where it lies, without a copy: do not write into files in use.

    Args:
        address: what `dew.converters.open_folder.local_folder` takes.
        dtype: of the variables; None keeps what each tensor is stored in.
        shardings: where variables go; None is the default device.
        tied: which side counts where config and file disagree about a tied head, see
            `dew.converters.tied_weights`.
        ignore_fields: fields of config.json that mean nothing.
        dequantise: whether a quantised folder is read as the plain one that
            `dew.converters.folder.dequantize` makes of it.
        unpickle: what turns a folder of pickles into safetensors; None refuses them.

    Raises:
        ValueError: anything in the folder that is not accounted for, all of it at once.
    """
    path = local_folder(address)
    path = dequantised(path) if dequantise else path
    folder = read_folder(path, os.fspath(address), unpickle)
    family = family_of(folder.config, folder.address)
    weights = folder.weights
    spelling = _spelling(family, weights)
    rules, copies, ignored = family.with_spelling(spelling)
    ties = settle(family, rules, copies, folder.config, weights, tied)
    config = family.read({**folder.config, **ties.edits}, ignore_fields)
    model = family.model(config)
    table = build_table(
        rules,
        variable_shapes(model),
        copies=ties.copies,
        ignored=ignored,
    )
    _check(folder, table, ties, family)
    return Pretrained(
        model=model,
        variables=read_variables(table, _borrowing(weights, ties), dtype, shardings),
        config=folder.config,
        tokenizer=folder.tokenizer,
        chat_template=folder.chat_template,
        eos_ids=folder.eos_ids,
        folder=folder,
        table=table,
        ties=ties,
    )


class UnknownFamilyError(ValueError):
    """A folder of an architecture that the native road does not have.

    `fault` says so; the whole message goes on with what there is instead.
    """

    def __init__(self, fault: str, known: str) -> None:
        super().__init__(f"{fault}{known}")
        self.fault = fault


def family_of(config: Mapping[str, Any], address: str) -> Family:
    """Returns the family of a config.

    Raises:
        UnknownFamilyError: the native road has none for it.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise UnknownFamilyError(
            f"{address}: the native road has no family for model_type {kind!r}",
            f"{nearest(kind, list(FAMILIES))}; it has {', '.join(sorted(FAMILIES))}",
        )
    family = FAMILIES[kind]
    named = config.get("architectures") or list(family.architectures)
    if not set(named) & set(family.architectures):
        raise UnknownFamilyError(
            f"{address}: the native road has no {', '.join(named)} of model_type "
            f"{kind!r}",
            f"; architectures must be one of {', '.join(family.architectures)}",
        )
    return family


def _spelling(family: Family, weights: Weights) -> Prefix:
    """The declared spelling that knows most of the file's names."""
    held = {
        re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "#", name) for name in weights.entries
    }

    def known(spelling: Prefix) -> int:
        patterns = [
            template_pattern(r.source) for r in family.with_spelling(spelling)[0]
        ]
        return sum(any(p.fullmatch(name) for name in held) for p in patterns)

    return max(family.spellings, key=known)


def _borrowing(weights: Weights, ties: Ties) -> Weights:
    """The weights, with each tensor that the file lacks read from where it starts."""
    borrowed = {
        name: replace(weights.entries[origin], name=name)
        for name, origin in ties.borrowed.items()
        if origin in weights.entries
    }
    return replace(weights, entries={**weights.entries, **borrowed})


def _check(folder: Folder, table: Table, ties: Ties, family: Family) -> None:
    """Raises all that is wrong with the stored tensors at once."""
    weights = _borrowing(folder.weights, ties)
    found = {n: s for n, s in weights.shapes().items() if n not in ties.dropped}
    spellings = ", ".join(repr(spelling.body) for spelling in family.spellings)
    faults = [
        *weights.faults,
        *ties.faults,
        *name_faults(table, found, f"prefixes of this family: {spellings}"),
        *unreadable(weights, [name for name in table.sources if name in found]),
    ]
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults)
        raise ValueError(f"the tensors of {folder.address} do not fit:{listed}")


def read_variables(
    table: Table, weights: Weights, dtype: Any, shardings: Shardings | None
) -> dict[str, Any]:
    """Reads every variable of a table to its place, one after the other."""
    place = _places(shardings)
    leaves = {}
    for path, shape in table.variables.items():
        names = [piece.source for piece in table.targets[path]]
        wanted = _dtype(weights, names) if dtype is None else np.dtype(dtype)

        def part(
            index: Index | None, path: Path = path, wanted: np.dtype = wanted
        ) -> np.ndarray:
            return cast(table.read(path, weights.view, index or ()), wanted)

        sharding = place(path)
        if sharding is None:
            leaves[path] = jax.device_put(part(()))
        else:
            leaves[path] = jax.make_array_from_callback(shape, sharding, part)
        leaves[path].block_until_ready()
        for name in names:
            weights.release(name)
    return unflatten(leaves)


def _dtype(weights: Weights, names: Sequence[str]) -> np.dtype:
    """The dtype that keeps the tensors exact, as far as JAX has it (no float64)."""
    kinds = {weights.dtype(name) for name in names}
    kind = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
    return np.dtype(jax.dtypes.canonicalize_dtype(kind))


def _places(
    shardings: Shardings | None,
) -> Callable[[Path], jax.sharding.Sharding | None]:
    if shardings is None:
        return lambda path: None
    if callable(shardings):
        return shardings
    return flatten(shardings).__getitem__
