"""Width pruning: selects neurons, heads and dimensions by the norms of their weights.

Tensors are cut as they are stored, so that kept values keep their bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dew.converters.config.fields import Use
from dew.converters.load import family_of
from dew.converters.mapping.rules import FROM_HEADS, HEADS, HEADS_BIAS
from dew.converters.pretrained import Pretrained
from dew.typing import Path

PLAIN = (HEADS, HEADS_BIAS, FROM_HEADS)

AXES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("embed", "weight"): ("vocab", "embed"),
    ("head", "weight"): ("vocab", "embed"),
    ("q", "weight"): ("heads", "embed"),
    ("q", "bias"): ("heads",),
    ("k", "weight"): ("kv", "embed"),
    ("k", "bias"): ("kv",),
    ("v", "weight"): ("kv", "embed"),
    ("v", "bias"): ("kv",),
    ("o", "weight"): ("embed", "heads"),
    ("o", "bias"): ("embed",),
    ("gate", "weight"): ("mlp", "embed"),
    ("up", "weight"): ("mlp", "embed"),
    ("down", "weight"): ("embed", "mlp"),
    ("gate", "bias"): ("mlp",),
    ("up", "bias"): ("mlp",),
    ("down", "bias"): ("embed",),
    ("attn_norm", "weight"): ("embed",),
    ("mlp_norm", "weight"): ("embed",),
    ("attn_post_norm", "weight"): ("embed",),
    ("mlp_post_norm", "weight"): ("embed",),
    ("norm", "weight"): ("embed",),
    ("q_norm", "weight"): ("dim",),
    ("k_norm", "weight"): ("dim",),
}
"""The stored axes of tensors, by the last two names of the variable behind them."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Sizes to keep of a model's widths; None keeps all."""

    mlp: int | None = None
    """Neurons of each block's feed-forward layer."""
    kv_heads: int | None = None
    """Key and value heads of each block, with the query heads that share them."""
    embed: int | None = None
    """Dimensions of the residual stream, the same ones in all blocks."""

    @property
    def is_whole(self) -> bool:
        """Whether all widths are kept."""
        return (self.mlp, self.kv_heads, self.embed) == (None, None, None)


WHOLE = Widths()
"""Keeps every width of the model."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Indices kept on each axis, and the config of the model that they make."""

    kept: Mapping[tuple[str, str], np.ndarray]
    """Kept indices by block and axis; the block is empty outside of blocks."""
    config: Mapping[str, int]
    """New values of config fields."""
    axes: Mapping[str, tuple[tuple[str, str], ...]]
    """Block and axis behind each axis of a stored tensor."""

    def of(self, name: str, stored: np.ndarray) -> np.ndarray:
        """Returns the kept part of a stored tensor."""
        for axis, key in enumerate(self.axes.get(name, ())):
            if key in self.kept:
                stored = np.take(stored, self.kept[key], axis=axis)
        return stored

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a stored tensor's kept part."""
        keys = self.axes.get(name, ())
        if not keys:
            return tuple(shape)
        return tuple(
            len(self.kept[key]) if key in self.kept else size
            for key, size in zip(keys, shape, strict=True)
        )


def select_widths(source: Pretrained, widths: Widths, layers: Sequence[int]) -> Cut:
    """Selects the neurons, heads and dimensions with the largest weights.

    The score of each is the product of two norms: of its incoming and its outgoing
    weights. A dimension of the residual stream is scored over all kept blocks.

    Args:
        source: the model to prune.
        widths: sizes to keep.
        layers: numbers of the kept blocks.

    Raises:
        ValueError: a width is out of range, or a tensor's axes are not known.
    """
    if widths.is_whole:
        return Cut(kept={}, config={}, axes={})
    sizes = _sizes(source)
    _check(widths, sizes)
    axes = _axes(source)
    kept: dict[tuple[str, str], np.ndarray] = {}
    for layer in map(str, layers):
        read = _Reader(source=source, layer=layer)
        if widths.mlp is not None:
            kept[layer, "mlp"] = _largest(read.neurons(), widths.mlp)
        if widths.kv_heads is not None:
            heads = _largest(read.heads(sizes), widths.kv_heads)
            dim, group = sizes["dim"], sizes["heads"] // sizes["kv"]
            kept[layer, "kv"] = _runs(heads, dim)
            kept[layer, "heads"] = _runs(heads, dim * group)
    if widths.embed is not None:
        dimensions = _largest(_dimensions(source, axes, layers), widths.embed)
        kept |= {(layer, "embed"): dimensions for layer in ("", *map(str, layers))}
    return Cut(kept=kept, config=_config(source, widths, sizes), axes=axes)


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Norms of one block's weights, by neuron and by head."""

    source: Pretrained
    layer: str

    def stored(self, *names: str) -> np.ndarray:
        path = ("params", "layers", self.layer, *names, "weight")
        pieces = self.source.table.targets.get(path, ())
        if not pieces:
            raise ValueError(f"block {self.layer} has no {'/'.join(names)} to cut")
        view = self.source.folder.weights.view(pieces[0].source)
        return np.asarray(view, np.float32)

    def neurons(self) -> np.ndarray:
        down = np.linalg.norm(self.stored("mlp", "down"), axis=0)
        up = np.linalg.norm(self.stored("mlp", "up"), axis=1)
        gate = ("params", "layers", self.layer, "mlp", "gate", "weight")
        if gate not in self.source.table.targets:
            return up * down
        return up * down * np.linalg.norm(self.stored("mlp", "gate"), axis=1)

    def heads(self, sizes: Mapping[str, int]) -> np.ndarray:
        values = self.stored("attn", "v").reshape(sizes["kv"], -1)
        outs = self.stored("attn", "o")
        outs = outs.reshape(outs.shape[0], sizes["kv"], -1)
        return np.linalg.norm(values, axis=1) * np.linalg.norm(outs, axis=(0, 2))


def _dimensions(
    source: Pretrained,
    axes: Mapping[str, tuple[tuple[str, str], ...]],
    layers: Sequence[int],
) -> np.ndarray:
    """Returns the score of every dimension of the residual stream."""
    sums: dict[bool, Any] = {True: 0.0, False: 0.0}
    for name, keys in axes.items():
        names = [axis for _, axis in keys]
        blocks = ("", *map(str, layers))
        if "embed" not in names or len(keys) < 2 or keys[0][0] not in blocks:
            continue
        place = names.index("embed")
        tensor = np.asarray(source.folder.weights.view(name), np.float32)
        squares = np.square(tensor).sum(axis=1 - place)
        # Stored as [out, in]: the first axis is written to, the second is read.
        sums[place == 0] = sums[place == 0] + squares
        source.folder.weights.release(name)
    return np.sqrt(sums[True]) * np.sqrt(sums[False])


def _axes(source: Pretrained) -> dict[str, tuple[tuple[str, str], ...]]:
    """Returns the block and axis name behind each axis of every stored tensor."""
    axes, faults = {}, []
    for name, pieces in source.table.sources.items():
        path = pieces[0].target
        names = AXES.get((path[-2], path[-1]))
        pattern = pieces[0].layout.pattern
        is_plain = len(pieces) == 1 and (pattern in PLAIN or _is_same(pattern))
        if names is None or not is_plain or pieces[0].entry is not None:
            faults.append(name)
            continue
        layer = path[2] if path[1] == "layers" else ""
        axes[name] = tuple((layer, axis) for axis in names)
    if faults:
        raise ValueError(
            "the widths of these tensors cannot be cut, for they are experts, fused or "
            f"of another kind: {', '.join(faults[:5])}"
        )
    return axes


def _is_same(pattern: str) -> bool:
    stored, variable = pattern.split("->")
    return stored.split() == variable.split()


def _sizes(source: Pretrained) -> dict[str, int]:
    """Returns the widths of the model, from the shapes of its variables."""
    shapes: dict[Path, tuple[int, ...]] = dict(source.table.variables)
    block = ("params", "layers", "0")
    try:
        heads, dim, embed = shapes[*block, "attn", "q", "weight"]
        kv = shapes[*block, "attn", "k", "weight"][0]
        mlp = shapes[*block, "mlp", "up", "weight"][0]
    except KeyError as missing:
        raise ValueError(
            f"{source.address} has no {missing} whose width could be cut"
        ) from missing
    return {"heads": heads, "dim": dim, "embed": embed, "kv": kv, "mlp": mlp}


def _check(widths: Widths, sizes: Mapping[str, int]) -> None:
    targets = {"mlp": widths.mlp, "kv": widths.kv_heads, "embed": widths.embed}
    faults = [
        f"{name} can be 1 to {sizes[name]}, got {value}"
        for name, value in targets.items()
        if value is not None and not 1 <= value <= sizes[name]
    ]
    if faults:
        raise ValueError("widths: " + "; ".join(faults))


def _config(
    source: Pretrained, widths: Widths, sizes: Mapping[str, int]
) -> dict[str, int]:
    """Returns the config's fields with the pruned widths."""
    kv = widths.kv_heads or sizes["kv"]
    attributes = {
        "mlp.dim": widths.mlp or sizes["mlp"],
        "attention.kv_heads": kv,
        "attention.heads": kv * sizes["heads"] // sizes["kv"],
        "attention.head_dim": sizes["dim"],
        "embed": widths.embed or sizes["embed"],
    }
    family = family_of(source.config, source.address)
    spelled = {new: old for old, new in family.aliases.items()}
    changed = {}
    for name, field in family.fields.items():
        targets = field.to if isinstance(field, Use) else ()
        for target in (targets,) if isinstance(targets, str) else targets:
            if target in attributes:
                written = spelled.get(name, name)
                changed[name if name in source.config else written] = attributes[target]
    return changed


def _largest(sizes: np.ndarray, count: int) -> np.ndarray:
    """Returns the ascending indices of the largest; the first of equal ones."""
    return np.sort(np.argsort(-sizes, kind="stable")[:count])


def _runs(places: np.ndarray, size: int) -> np.ndarray:
    """Returns the indices within an axis of runs of `size` that the runs cover."""
    return (places[:, None] * size + np.arange(size)).reshape(-1)
