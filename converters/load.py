"""Loads a folder as a flax model and its variables: the native road."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from dew.converters.errors import UnsupportedError, nearest
from dew.converters.families import FAMILIES
from dew.converters.families.base import Family, UnsupportedConfigError
from dew.converters.folder.dtypes import convert_dtype
from dew.converters.folder.folder import Unpickle
from dew.converters.folder.weights import Weights, unreadable
from dew.converters.mapping.build import build_table
from dew.converters.mapping.rules import Prefix, template_pattern
from dew.converters.mapping.shapes import variable_shapes
from dew.converters.mapping.table import Index, Table, name_faults
from dew.converters.open_folder import Address, open_folder
from dew.converters.pretrained import Pretrained
from dew.converters.tied_weights import Tied, Ties, settle
from dew.tree import flatten, unflatten
from dew.typing import Path, Variables

Shardings = (
    Callable[[Path, tuple[int, ...]], jax.sharding.Sharding | None] | Mapping[str, Any]
)
"""Shardings: a function of a variable's path and shape, or a tree like the variables.

`dew.training.sharding.placement` is such a function: that of the trainer.
"""


def load_native(
    address: Address,
    *,
    dtype: DTypeLike | None = None,
    shardings: Shardings | None = None,
    tied: Tied | None = None,
    ignore_fields: Sequence[str] = (),
    dequantise: bool = False,
    unpickle: Unpickle | None = None,
) -> Pretrained:
    """Loads a folder, hub id or URL whose architecture is one of `FAMILIES`.

    Tensors are read one at a time; with `shardings` each device receives its part and
    none holds the whole. On a CPU a tensor that is aligned to 64 bytes in its file is
    used in place, without a copy: do not write into files in use.

    Args:
        address: see `dew.converters.open_folder.open_folder`.
        dtype: dtype of the variables; None keeps each tensor's stored dtype.
        shardings: sharding of each variable; None is the default device.
        tied: whether the config or the file counts where they disagree about a tied
            head, see `dew.converters.tied_weights`.
        ignore_fields: fields of config.json that are ignored, not refused.
        dequantise: whether a quantised folder is read as the plain one that
            `dew.converters.folder.dequantize` makes of it.
        unpickle: converts pickled weights to safetensors; None refuses them.

    Raises:
        ValueError: the folder has fields or tensors that are not accounted for; the
            message lists all of them.
    """
    folder = open_folder(address, dequantise=dequantise, unpickle=unpickle)
    weights = folder.weights
    family = family_of(folder.config, folder.address)
    rules, copies, ignored = family.with_spelling(_spelling(family, weights))
    if family.is_trunk(folder.config):
        # A stored head is carried as it is: transformers ignores it.
        ignored = (*ignored, *sorted(family.head_names(rules, copies)))
    ties = settle(family, rules, copies, folder.config, weights, tied)
    config = family.read({**folder.config, **ties.edits}, ignore_fields)
    model = family.model(config)
    table = build_table(
        rules,
        variable_shapes(model),
        copies=ties.copies,
        ignored=ignored,
    )
    weights = _with_borrowed(weights, ties)
    _check(folder.address, weights, table, ties, family)
    return Pretrained(
        model=model,
        variables=read_variables(table, weights, dtype, shardings),
        config=folder.config,
        tokenizer=folder.tokenizer,
        chat_template=folder.chat_template,
        eos_ids=folder.eos_ids,
        folder=folder,
        table=table,
        ties=ties,
        ignored_fields=family.ignored_fields(folder.config, ignore_fields),
        known_fields=family.known,
    )


class UnknownFamilyError(UnsupportedError):
    """The native road has no family for a folder's architecture."""


def unknown_family(
    config: Mapping[str, object], address: str
) -> UnknownFamilyError | None:
    """Returns why the native road cannot load a config; None where it can."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        return UnknownFamilyError(
            f"{address}: the native road has no family for model_type {model_type!r}",
            f"{nearest(model_type, list(FAMILIES))}; it has "
            f"{', '.join(sorted(FAMILIES))}",
        )
    known = FAMILIES[model_type].architectures
    architectures = config.get("architectures") or known
    assert isinstance(architectures, Sequence)
    if not set(architectures) & set(known):
        return UnknownFamilyError(
            f"{address}: the native road has no {', '.join(architectures)} of "
            f"model_type {model_type!r}",
            f"; architectures must be one of {', '.join(known)}",
        )
    return None


def unsupported(
    config: Mapping[str, object], address: str, ignore_fields: Sequence[str] = ()
) -> UnsupportedError | None:
    """Returns why the native road leaves a config to the lowered one; None if not.

    Raises:
        ValueError: fields of the config have values of a wrong type.
    """
    unknown = unknown_family(config, address)
    if unknown is not None:
        return unknown
    try:
        family_of(config, address).read(config, ignore_fields)
    except UnsupportedConfigError as fault:
        return fault
    return None


def family_of(config: Mapping[str, object], address: str) -> Family:
    """Returns the family of a config.

    Raises:
        UnknownFamilyError: the native road has none for it.
    """
    unknown = unknown_family(config, address)
    if unknown is not None:
        raise unknown
    return FAMILIES[str(config["model_type"])]


def _spelling(family: Family, weights: Weights) -> Prefix:
    """Returns the family's spelling that matches most names in the file."""
    # One name for each kind of layer is enough: numbers become "#".
    names = {
        re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "#", name) for name in weights.entries
    }

    def num_matches(spelling: Prefix) -> int:
        patterns = [
            template_pattern(r.source) for r in family.with_spelling(spelling)[0]
        ]
        return sum(any(p.fullmatch(name) for name in names) for p in patterns)

    return max(family.spellings, key=num_matches)


def _with_borrowed(weights: Weights, ties: Ties) -> Weights:
    """Returns the weights, with tensors that the file lacks read from their origins."""
    borrowed = {
        name: replace(weights.entries[origin], name=name)
        for name, origin in ties.borrowed.items()
        if origin in weights.entries
    }
    return replace(weights, entries={**weights.entries, **borrowed})


def _check(
    address: str, weights: Weights, table: Table, ties: Ties, family: Family
) -> None:
    """Raises everything that is wrong with the stored tensors, at once."""
    shapes = {n: s for n, s in weights.shapes().items() if n not in ties.dropped}
    spellings = ", ".join(repr(spelling.body) for spelling in family.spellings)
    faults = [
        *weights.faults,
        *ties.faults,
        *name_faults(table, shapes, f"prefixes of this family: {spellings}"),
        *unreadable(weights, [name for name in table.sources if name in shapes]),
    ]
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise ValueError(f"the tensors of {address} do not fit:{lines}")


def read_variables(
    table: Table,
    weights: Weights,
    dtype: DTypeLike | None,
    shardings: Shardings | None,
) -> Variables:
    """Reads every variable of a table onto its devices, one after the other.

    A `dtype` of None keeps what the tensors are stored in, narrowed to what JAX has.
    """
    sharding_of = sharding_function(shardings)
    leaves = {}
    for path, shape in table.variables.items():
        names = [piece.source for piece in table.targets[path]]
        new_dtype = _dtype(weights, names) if dtype is None else np.dtype(dtype)

        def part(
            index: Index | None, path: Path = path, new_dtype: np.dtype = new_dtype
        ) -> np.ndarray:
            stored = table.read(path, weights.view, index or ())
            return convert_dtype(stored, new_dtype)

        sharding = sharding_of(path, shape)
        if sharding is None:
            leaves[path] = jax.device_put(part(()))
        else:
            leaves[path] = jax.make_array_from_callback(shape, sharding, part)
        # The copy must be done before the file's pages are released.
        leaves[path].block_until_ready()
        for name in names:
            weights.release(name)
    return unflatten(leaves)


def _dtype(weights: Weights, names: Sequence[str]) -> np.dtype:
    """Returns the dtype that keeps the tensors exact, or float32 for float64."""
    kinds = {weights.dtype(name) for name in names}
    kind = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
    return np.dtype(jax.dtypes.canonicalize_dtype(kind))


def sharding_function(
    shardings: Shardings | None,
) -> Callable[[Path, tuple[int, ...]], jax.sharding.Sharding | None]:
    """Returns shardings as a function; of None, one that leaves every place open."""
    if shardings is None:
        return lambda path, shape: None
    if callable(shardings):
        return shardings
    tree = flatten(shardings)
    return lambda path, shape: tree[path]
