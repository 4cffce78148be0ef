"""Which widths of a model to keep, by the size of the weights behind them.

Widths are cut in the tensors as they are stored, so that what is kept keeps its bytes.
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
    """How much of each width to keep; None keeps all.

    `mlp` counts neurons of each block's feed-forward layer, `kv_heads` heads of keys
    and values, whose queries go with them, and `embed` dimensions of the residual
    stream, the same in all blocks.
    """

    mlp: int | None = None
    kv_heads: int | None = None
    embed: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut."""
        return (self.mlp, self.kv_heads, self.embed) == (None, None, None)


WHOLE = Widths()
"""Cuts nothing."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The places that are kept, by block and axis, and what the config says then."""

    kept: Mapping[tuple[str, str], np.ndarray]
    config: Mapping[str, Any]
    axes: Mapping[str, tuple[tuple[str, str], ...]]

    def of(self, name: str, stored: np.ndarray) -> np.ndarray:
        """What is kept of a stored tensor."""
        for axis, key in enumerate(self.axes.get(name, ())):
            if key in self.kept:
                stored = np.take(stored, self.kept[key], axis=axis)
        return stored

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Its shape."""
        keys = self.axes.get(name, ())
        if not keys:
            return tuple(shape)
        return tuple(
            len(self.kept[key]) if key in self.kept else size
            for key, size in zip(keys, shape, strict=True)
        )


def choose(source: Pretrained, widths: Widths, layers: Sequence[int]) -> Cut:
    """Chooses what to keep in blocks `layers`: what has the largest weights.

    A neuron's, head's or dimension's size is the product of the norms of the weights
    that write it and that read it; a dimension's is taken over all blocks kept.

    Raises:
        ValueError: a width is out of range, or a tensor's widths cannot be told apart.
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
        chosen = _largest(_dimensions(source, axes, layers), widths.embed)
        kept |= {(layer, "embed"): chosen for layer in ("", *map(str, layers))}
    return Cut(kept=kept, config=_config(source, widths, sizes), axes=axes)


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """The norms of one block's weights, neuron by neuron and head by head."""

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
    """The size of every dimension of the residual stream, over the kept blocks."""
    sums: dict[bool, Any] = {True: 0.0, False: 0.0}
    for name, keys in axes.items():
        named = [axis for _, axis in keys]
        if "embed" not in named or len(keys) < 2 or keys[0][0] not in _told(layers):
            continue
        place = named.index("embed")
        tensor = np.asarray(source.folder.weights.view(name), np.float32)
        squares = np.square(tensor).sum(axis=1 - place)
        # Stored as [out, in]: the first axis is written to, the second is read.
        sums[place == 0] = sums[place == 0] + squares
        source.folder.weights.release(name)
    return np.sqrt(sums[True]) * np.sqrt(sums[False])


def _told(layers: Sequence[int]) -> tuple[str, ...]:
    return ("", *map(str, layers))


def _axes(source: Pretrained) -> dict[str, tuple[tuple[str, str], ...]]:
    """The block and the axis name behind each axis of every stored tensor."""
    found, faults = {}, []
    for name, pieces in source.table.sources.items():
        path = pieces[0].target
        known = AXES.get((path[-2], path[-1]))
        pattern = pieces[0].layout.pattern
        is_plain = len(pieces) == 1 and (pattern in PLAIN or _is_same(pattern))
        if known is None or not is_plain or pieces[0].entry is not None:
            faults.append(name)
            continue
        layer = path[2] if path[1] == "layers" else ""
        found[name] = tuple((layer, axis) for axis in known)
    if faults:
        raise ValueError(
            "the widths of these tensors cannot be cut, for they are experts, fused or "
            f"of another kind: {', '.join(faults[:5])}"
        )
    return found


def _is_same(pattern: str) -> bool:
    stored, variable = pattern.split("->")
    return stored.split() == variable.split()


def _sizes(source: Pretrained) -> dict[str, int]:
    """The widths that the model has, from its own variables."""
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
    wanted = {"mlp": widths.mlp, "kv": widths.kv_heads, "embed": widths.embed}
    faults = [
        f"{name} can be 1 to {sizes[name]}, got {value}"
        for name, value in wanted.items()
        if value is not None and not 1 <= value <= sizes[name]
    ]
    if faults:
        raise ValueError("widths: " + "; ".join(faults))


def _config(
    source: Pretrained, widths: Widths, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """The config's fields as the cut model has them."""
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
    found = {}
    for name, field in family.fields.items():
        targets = field.to if isinstance(field, Use) else ()
        for target in (targets,) if isinstance(targets, str) else targets:
            if target in attributes:
                written = spelled.get(name, name)
                found[name if name in source.config else written] = attributes[target]
    return found


def _largest(sizes: np.ndarray, count: int) -> np.ndarray:
    """The places of the largest, in their own order; the first of equal ones."""
    return np.sort(np.argsort(-sizes, kind="stable")[:count])


def _runs(places: np.ndarray, size: int) -> np.ndarray:
    """The places within an axis that is laid out in runs."""
    return (places[:, None] * size + np.arange(size)).reshape(-1)
