"""Depth pruning: writes a smaller model of some blocks and widths of a larger one."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dew.converters.config.fields import Use
from dew.converters.folder.atomic import write_atomically
from dew.converters.folder.safetensors import Spec
from dew.converters.folder.weights import SINGLE
from dew.converters.folder.write import copied_files, json_bytes, write_folder
from dew.converters.load import family_of
from dew.converters.pretrained import Pretrained
from dew.converters.surgery.prune_widths import WHOLE, Widths, select_widths

LAYERS = "layers"


def prune_layers(
    source: Pretrained,
    layers: Sequence[int],
    folder: str | os.PathLike[str],
    widths: Widths = WHOLE,
) -> Path:
    """Writes a folder with only the blocks `layers` of a native model, in that order.

    Kept values keep their bytes; tensors of a block are renamed to its new number. The
    config changes in the number of blocks, in pruned widths, and in lists with one
    entry for each block.

        >>> import dew
        >>> from dew.converters.surgery import prune_layers
        >>> folder = prune_layers(dew.load(FOLDER), (0,), "one-block")
        >>> dew.load(folder).config["num_hidden_layers"]
        1

    Args:
        source: the model to prune.
        layers: numbers of the kept blocks, counted from 0.
        folder: the folder to write; it appears when it is complete.
        widths: sizes of the widths to keep; by default all.

    Raises:
        ValueError: a block does not exist or is named twice, a block would be of
            another kind in its new place, or the folder exists.
    """
    field, count = _count(source)
    _check(layers, count)
    cut = select_widths(source, widths, layers)
    names = _renamed(source, layers)
    weights = source.folder.weights
    specs = [
        Spec(
            name=new,
            dtype=weights.dtype(old),
            shape=cut.shape(old, weights.entries[old].shape),
        )
        for new, old in names.items()
    ]
    config = _config(source, field, count, layers)
    _check_kinds(source, config, layers)
    config |= cut.config
    with write_atomically(Path(folder).expanduser().absolute()) as partial:
        write_folder(
            partial,
            {SINGLE: specs},
            lambda name: cut.of(names[name], weights.view(names[name])),
            config=json_bytes(config),
            side_files=copied_files(source.folder.path),
            release=lambda name: weights.release(names[name]),
        )
    return Path(folder)


def spread_layers(count: int, kept: int) -> tuple[int, ...]:
    """Returns `kept` of `count` block numbers, evenly spread from first to last.

    Raises:
        ValueError: `kept` is not between 1 and `count`.
    """
    if not 1 <= kept <= count:
        raise ValueError(f"a model of {count} blocks can keep 1 to {count}, got {kept}")
    if kept == 1:
        return (count - 1,)
    step = (count - 1) / (kept - 1)
    return tuple(int(i * step + 0.5) for i in range(kept))


def num_layers(source: Pretrained) -> int:
    """Returns the number of blocks of a native model."""
    return _count(source)[1]


def _count(source: Pretrained) -> tuple[str, int]:
    """Returns the config field of the number of blocks, and that number."""
    family = family_of(source.config, source.address)
    fields = [
        name
        for name, field in family.fields.items()
        if isinstance(field, Use) and field.to == LAYERS
    ]
    if not fields:
        raise ValueError(
            f"{source.address}: its blocks share their weights, so none can be cut out"
        )
    blocks = {path[2] for path in source.table.variables if path[1] == LAYERS}
    return fields[0], len(blocks)


def _check(layers: Sequence[int], count: int) -> None:
    faults = [
        f"{i} is no block of 0 to {count - 1}" for i in layers if not 0 <= i < count
    ]
    if not layers:
        faults.append("at least one block must be kept")
    if len(set(layers)) < len(layers):
        faults.append(f"a block is named twice in {list(layers)}")
    if faults:
        raise ValueError("layers: " + "; ".join(faults))


def _check_kinds(
    source: Pretrained, config: Mapping[str, Any], layers: Sequence[int]
) -> None:
    """Raises where a kept block would be of another kind in its new place.

    A config may define which blocks have a window, or lack a norm, by position alone.
    """
    family = family_of(source.config, source.address)
    before, after = (
        family.read({**one, **source.ties.edits}, ignore_fields=tuple(one))
        for one in (source.config, config)
    )
    faults = [
        f"block {old} would be of another kind as block {new}"
        for new, old in enumerate(layers)
        if before.kind_of(old) != after.kind_of(new)
    ]
    if faults:
        raise ValueError(
            "layers: " + "; ".join(faults) + ". Keep others, or list the kinds of the "
            "blocks in config.json (layer_types)"
        )


def _renamed(source: Pretrained, layers: Sequence[int]) -> dict[str, str]:
    """Returns the old name of every kept tensor by its new name."""
    numbers = {str(old): str(new) for new, old in enumerate(layers)}
    names = {}
    for old in source.folder.weights.entries:
        pieces = source.table.sources.get(old)
        if pieces is None:
            continue
        _, top, *below = pieces[0].target
        if top != LAYERS:
            names[old] = old
        elif below[0] in numbers:
            parts = old.split(".")
            # The block's number comes before any other, such as an expert's.
            parts[parts.index(below[0])] = numbers[below[0]]
            names[".".join(parts)] = old
    return names


def _config(
    source: Pretrained, field: str, count: int, layers: Sequence[int]
) -> dict[str, Any]:
    config = {}
    for name, value in source.config.items():
        is_per_layer = type(value) is list and len(value) == count
        config[name] = [value[i] for i in layers] if is_per_layer else value
    return {**config, field: len(layers)}
