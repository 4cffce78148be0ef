"""Loads a folder as a lowered model; weights go from file to device, not via torch."""

import re
from collections.abc import Mapping
from dataclasses import replace

import jax
import numpy as np
import transformers
from jax.typing import DTypeLike
from jaxtyping import PyTree
from transformers import PreTrainedConfig, PreTrainedModel

from dew.bridges.dlpack import to_torch
from dew.bridges.dtypes import torch_dtype
from dew.bridges.loading.config_fields import known_fields
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
from dew.converters.config.fields import COMMON
from dew.converters.errors import brief
from dew.converters.folder.folder import Folder
from dew.converters.folder.weights import FLOATS, Weights
from dew.converters.load import Shardings, read_variables
from dew.converters.mapping.table import (
    LEFTOVER,
    Piece,
    Table,
    join_tables,
    plain_table,
)
from dew.converters.open_folder import Address, open_folder
from dew.converters.pretrained import Pretrained
from dew.tree import flatten
from dew.typing import Path, Variables


def load_lowered(
    address: Address,
    *,
    dtype: DTypeLike | None = None,
    shardings: Shardings | None = None,
    dequantise: bool = False,
    example_inputs: Mapping[str, PyTree] | None = None,
    dynamic: bool = True,
    check: bool = True,
) -> Pretrained:
    """Loads a folder, hub id or URL of any architecture that transformers has.

    The module is built on the meta device and weights go from file to device. With
    `check` it is compared once with torch on `example_inputs`, by default a small
    random batch; torch then reads the same memory. Weights that `shardings` split are
    in no place together, and are not compared. `dtype` is by default that of the
    stored weights, float32 if they have several.

    Raises:
        ValueError: transformers lacks the architecture of the folder, or its
            tensors are not those of the module; all of them are named.
        LoweringError: the module does not lower, or disagrees with torch.
    """
    folder = open_folder(address, dequantise=dequantise, unpickle=unpickle)
    kind, config = _architecture(folder)
    weights = folder.weights
    target = _stored_dtype(weights) if dtype is None else np.dtype(dtype)
    module = meta_module(kind, config, torch_dtype(target), weights.entries)
    table = _table(folder, module)
    variables = read_variables(table, weights, target, shardings)
    known = known_fields(type(config))
    example = example_inputs or random_inputs(module, config)
    lowered = lowered_module(
        module,
        variables,
        torch_inputs(module, jax.tree.map(np.asarray, dict(example))),
        dynamic=dynamic,
    )
    # Torch would need all weights in one process, which may not hold them.
    if check and not _is_split(variables):
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
        ignored_fields=tuple(
            name
            for name, value in folder.config.items()
            if name not in known.declared | known.read | COMMON.keys()
            and value is not None
        ),
        known_fields=known,
    )


def _is_split(variables: Variables) -> bool:
    leaves = flatten(variables).values()
    return not all(leaf.is_fully_replicated for leaf in leaves)


def _architecture(
    folder: Folder,
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Returns the transformers class and config of a folder."""
    names = folder.config.get("architectures") or []
    kinds = [getattr(transformers, name, None) for name in names]
    kind = next((kind for kind in kinds if kind is not None), None)
    if kind is None:
        raise ValueError(
            f"{folder.address}: config.json must name an architecture of transformers "
            f"in `architectures`, got {names}; build the module yourself and call "
            "dew.bridges.lower on it"
        )
    model_type = kind.config_class.model_type
    stored = folder.config.get("model_type")
    if stored not in (None, model_type):
        raise ValueError(
            f"{folder.address}: model_type must be {model_type!r}, which "
            f"{kind.__name__} is of, got {stored!r}"
        )
    return kind, kind.config_class.from_pretrained(folder.path)


def _stored_dtype(weights: Weights) -> np.dtype:
    """Returns the one floating dtype of a folder; float32 if it has several."""
    kinds = {
        weights.dtype(name)
        for name, entry in weights.entries.items()
        if entry.dtype in FLOATS
    }
    return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)


def _table(folder: Folder, module: PreTrainedModel) -> Table:
    """Pairs stored tensors with the module's weights, by torch's own names.

    A folder of the base model fits a model with a head, and the reverse. Tied copies
    must be equal.

    Raises:
        ValueError: tensors are missing, unexpected, or tied and different.
    """
    weights, spelled = folder.weights, stored_names(module)
    first, apart = aliases(module), untrained_names(module)
    placed: dict[str, tuple[Path, tuple[int, ...]]] = {}
    copies: set[str] = set()
    paths: set[Path] = set()
    expected: dict[Path, str] = {}
    # `state_dict` lists tied weights under each of their names; the first is the
    # variable, and the files may store any of the names, several or one.
    for name, tensor in module.state_dict(keep_vars=True).items():
        collection = "buffers" if first[name] in apart else "params"
        path = (collection, *first[name].split("."))
        expected.setdefault(path, f"{name} {list(tensor.shape)}")
        for stored in spelled[name]:
            entry = weights.entries.get(stored)
            # The shape decides too: under a shared name a base model and one with a
            # head may store different tensors.
            if entry is not None and entry.shape == tuple(tensor.shape):
                copies |= {stored} if path in paths else set()
                paths.add(path)
                placed[stored] = (path, tuple(tensor.shape))
                break
    # After the whole tensors: a file may have both, and then the whole one counts.
    parts = _split_table(module, weights, paths)
    lost = [
        name for path, name in expected.items() if path not in paths | {*parts.targets}
    ]
    # Transformers has no public name for these patterns.
    ignored = module._keys_to_ignore_on_load_unexpected or ()  # pyright: ignore[reportPrivateUsage]
    prefix = f"{module.base_model_prefix}."
    # Older files store buffers that torch now recomputes.
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
        and not LEFTOVER.fullmatch(name)
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


def _split_table(module: PreTrainedModel, weights: Weights, placed: set[Path]) -> Table:
    """Pairs weights that files store only in parts, for example experts, with those."""
    first, apart = aliases(module), untrained_names(module)
    targets: dict[Path, tuple[Piece, ...]] = {}
    variables: dict[Path, tuple[int, ...]] = {}
    tensors = module.state_dict(keep_vars=True)
    for name, boxes in stored_parts(module).items():
        collection = "buffers" if first[name] in apart else "params"
        path = (collection, *first[name].split("."))
        pieces = pieces_of(path, boxes, weights.shapes())
        # No pieces means that some part is missing; `_table` then reports the weight
        # itself as missing, by the module's name.
        if pieces and path not in placed:
            targets[path], variables[path] = pieces, tuple(tensors[name].shape)
    sources = {p.source: (p,) for pieces in targets.values() for p in pieces}
    return Table(
        sources=sources,
        targets=targets,
        shapes={name: weights.entries[name].shape for name in sources},
        variables=variables,
    )


def _tied_differences(
    weights: Weights,
    placed: Mapping[str, tuple[Path, tuple[int, ...]]],
    copies: set[str],
) -> list[str]:
    """Returns a fault for each tied weight that is stored with different values."""
    origins = {path: name for name, (path, _) in placed.items() if name not in copies}
    return [
        f"{name} differs from {origins[placed[name][0]]}, to which the config ties it"
        for name in copies
        if placed[name][0] in origins
        and not np.array_equal(
            weights.view(name), weights.view(origins[placed[name][0]])
        )
    ]


def fill_meta_module(module: PreTrainedModel, lowered: Lowered) -> PreTrainedModel:
    """Assigns a meta module its weights; on one device torch reads JAX's memory."""
    leaves = flat_weights(lowered.variables)
    names = aliases(module)
    meta = dict(module.state_dict(keep_vars=True))
    is_sharded = any(len(leaf.sharding.device_set) > 1 for leaf in leaves.values())
    tensors = to_torch(leaves, copy=is_sharded)
    module.load_state_dict(
        {name: tensors[names[name]].to(meta[name].dtype) for name in meta}, assign=True
    )
    module.tie_weights()
    return module.eval()
