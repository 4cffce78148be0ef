"""From a folder to a lowered model: config and weights, with no copy held by torch."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import transformers

from dew.bridges.dlpack import to_torch
from dew.bridges.dtypes import torch_dtype
from dew.bridges.loading.meta import meta_module, stored_names
from dew.bridges.loading.pickles import unpickle
from dew.bridges.loading.split_weights import pieces_of, stored_parts
from dew.bridges.lowering.examples import random_inputs
from dew.bridges.lowering.lower import lowered_module
from dew.bridges.lowering.model import Lowered
from dew.bridges.lowering.parity import check_parity
from dew.bridges.names import (
    aliases,
    flat_weights,
    recomputed_buffers,
    torch_inputs,
    untrained_names,
)
from dew.converters.errors import brief
from dew.converters.folder.folder import Folder
from dew.converters.folder.weights import FLOATS, Weights
from dew.converters.load import Shardings, read_variables
from dew.converters.mapping.table import Piece, Table, join_tables, plain_table
from dew.converters.open_folder import Address, open_folder
from dew.converters.pretrained import Pretrained
from dew.typing import Path


def load_lowered(
    address: Address,
    *,
    dtype: Any = None,
    shardings: Shardings | None = None,
    dequantise: bool = False,
    example_inputs: Mapping[str, Any] | None = None,
    dynamic: bool = True,
    check: bool = True,
) -> Pretrained:
    """Loads a folder, hub id or URL of any architecture that transformers has.

    The module is built on the meta device and weights go from file to device. It is
    checked once against torch on `example_inputs`, by default a small random batch;
    torch then reads the same memory.

    Raises:
        ValueError: the folder is not of an architecture that transformers has, or its
            tensors are not those of the module; all of them are named.
        LoweringError: the module does not lower, or not to torch's answers.
    """
    folder = open_folder(address, dequantise=dequantise, unpickle=unpickle)
    kind, config = _architecture(folder)
    wanted = _stored_dtype(folder.weights) if dtype is None else np.dtype(dtype)
    module = meta_module(kind, config, torch_dtype(wanted), folder.weights.entries)
    table = _table(folder, module)
    variables = read_variables(table, folder.weights, wanted, shardings)
    example = example_inputs or random_inputs(module, config)
    lowered = lowered_module(
        module,
        variables,
        torch_inputs(module, jax.tree.map(np.asarray, dict(example))),
        dynamic=dynamic,
    )
    if check:
        check_parity(lowered, fill_meta_module(module, lowered))
    return Pretrained(
        model=lowered,
        variables=variables,
        config=folder.config,
        tokenizer=folder.tokenizer,
        chat_template=folder.chat_template,
        eos_ids=folder.eos_ids,
        folder=folder,
        table=table,
        road="lowered",
    )


def _architecture(folder: Folder) -> tuple[Any, Any]:
    """Returns the class and the config that transformers has for a folder."""
    names = folder.config.get("architectures") or []
    kinds = [getattr(transformers, name, None) for name in names]
    kind = next((found for found in kinds if found is not None), None)
    if kind is None:
        raise ValueError(
            f"{folder.address}: config.json must name an architecture of transformers "
            f"in `architectures`, got {names}; build the module yourself and call "
            "dew.bridges.lower on it"
        )
    said, known = folder.config.get("model_type"), kind.config_class.model_type
    if said not in (None, known):
        raise ValueError(
            f"{folder.address}: model_type must be {known!r}, which "
            f"{kind.__name__} is of, got {said!r}"
        )
    return kind, kind.config_class.from_pretrained(folder.path)


def _stored_dtype(weights: Weights) -> np.dtype:
    """The one floating dtype of a folder; float32 where it has several."""
    kinds = {
        weights.dtype(name)
        for name, entry in weights.entries.items()
        if entry.dtype in FLOATS
    }
    return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)


def _table(folder: Folder, module: Any) -> Table:
    """Pairs stored tensors with the module's weights, by torch's own names.

    A folder of the base model fits a model around it, and the other way round. Tied
    copies must be equal.
    """
    weights, spelled = folder.weights, stored_names(module)
    first, apart = aliases(module), untrained_names(module)
    placed: dict[str, tuple[Path, tuple[int, ...]]] = {}
    copies: set[str] = set()
    wanted: dict[Path, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        collection = "buffers" if first[name] in apart else "params"
        path = (collection, *first[name].split("."))
        wanted.setdefault(path, f"{name} {list(tensor.shape)}")
        for stored in spelled[name]:
            entry = weights.entries.get(stored)
            if entry is not None and entry.shape == tuple(tensor.shape):
                copies |= {stored} if path in dict(placed.values()) else set()
                placed[stored] = (path, tuple(tensor.shape))
                break
    parts = _split_table(module, weights, set(dict(placed.values())))
    taken = {*dict(placed.values()), *parts.targets}
    lost = [name for path, name in wanted.items() if path not in taken]
    ignored = module._keys_to_ignore_on_load_unexpected or ()
    prefix = f"{module.base_model_prefix}."
    # Older files store buffers that torch recomputes nowadays.
    left_out = {
        s for n in recomputed_buffers(module) for s in (n, n.removeprefix(prefix))
    }
    extra = [
        name
        for name in weights.entries
        if name not in placed
        and name not in parts.sources
        and name.removeprefix(prefix) not in left_out
        and not any(re.search(pattern, name) for pattern in ignored)
    ]
    faults = [*weights.faults, *(f"missing: {n}" for n in brief(lost))]
    faults += [f"unexpected: {n}" for n in brief(extra)]
    faults += _tied_differences(weights, placed, copies)
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults)
        raise ValueError(
            f"the tensors of {folder.address} are not those of "
            f"{type(module).__name__}:{listed}\nIf transformers converts them as it "
            "loads, load the module with it and call dew.bridges.lower on that"
        )
    return join_tables(replace(plain_table(placed), copies=frozenset(copies)), parts)


def _split_table(module: Any, weights: Weights, placed: set[Path]) -> Table:
    """Pairs weights that files have in parts only, experts say, with those parts."""
    first, apart = aliases(module), untrained_names(module)
    targets: dict[Path, tuple[Piece, ...]] = {}
    variables: dict[Path, tuple[int, ...]] = {}
    held = module.state_dict(keep_vars=True)
    for name, boxes in stored_parts(module).items():
        collection = "buffers" if first[name] in apart else "params"
        path = (collection, *first[name].split("."))
        pieces = pieces_of(path, boxes, weights.shapes())
        if pieces and path not in placed:
            targets[path], variables[path] = pieces, tuple(held[name].shape)
    sources = {p.source: (p,) for pieces in targets.values() for p in pieces}
    return Table(
        sources=sources,
        targets=targets,
        shapes={name: weights.entries[name].shape for name in sources},
        variables=variables,
    )


def _tied_differences(
    weights: Weights, placed: Mapping[str, tuple[Any, Any]], copies: set[str]
) -> list[str]:
    """Says which tied weights are stored twice with different values."""
    origins = {path: name for name, (path, _) in placed.items() if name not in copies}
    return [
        f"{name} differs from {origins[placed[name][0]]}, to which the config ties it"
        for name in copies
        if placed[name][0] in origins
        and not np.array_equal(
            weights.view(name), weights.view(origins[placed[name][0]])
        )
    ]


def fill_meta_module(module: Any, lowered: Lowered) -> Any:
    """Gives a meta module its weights; on one device torch reads JAX's memory."""
    leaves = flat_weights(lowered.variables)
    names = aliases(module)
    meta = dict(module.state_dict(keep_vars=True))
    spread = any(len(leaf.sharding.device_set) > 1 for leaf in leaves.values())
    tensors = to_torch(leaves, copy=spread)
    module.load_state_dict(
        {name: tensors[names[name]].to(meta[name].dtype) for name in meta}, assign=True
    )
    module.tie_weights()
    return module.eval()
