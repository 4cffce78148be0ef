"""Weights that a folder stores in parts: experts apart, gate and up apart.

Transformers merges them as it loads and splits them as it saves. The parts are inferred
by splitting small stand-ins whose elements are numbered.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from dew.converters.mapping.table import Piece, same_axes
from dew.typing import Path

Box = tuple[slice, ...]
"""A part of a weight: a range on each axis."""

_CUTS = 24
"""Cuts into 2, 3, 4, 6, 8, 12 and 24 equal parts fall between elements of a stand-in,
where they are cuts of the weight."""


def stored_parts(module: PreTrainedModel) -> dict[str, dict[str, Box]]:
    """Returns the parts of each weight that is saved in parts, by stored name.

    A weight with a part that is not a box of it, for example a transposed one, is left
    out.
    """
    held = module.state_dict(keep_vars=True)
    stand_ins, starts, first = {}, [], 0
    for name, tensor in held.items():
        shape = _stand_in_shape(tuple(tensor.shape))
        count = math.prod(shape)
        stand_ins[name] = torch.arange(first, first + count).reshape(shape)
        starts.append(first)
        first += count
    names = list(held)
    parts: dict[str, dict[str, Box]] = {}
    strange: set[str] = set()
    for stored, piece in revert_weight_conversion(module, dict(stand_ins)).items():
        held_in = [bisect_right(starts, int(n)) for n in (piece.min(), piece.max())]
        name = names[held_in[0] - 1]
        whole = stand_ins[name].numpy()
        # A part of several weights, as fused projections are, is a box of none.
        box = _box(piece.numpy(), whole) if held_in[0] == held_in[1] else None
        if box is None:
            strange.update(names[held_in[0] - 1 : held_in[1]])
        elif piece.numel() < whole.size:
            parts.setdefault(name, {})[stored] = _scale_box(box, whole, held[name])
    return {name: boxes for name, boxes in parts.items() if name not in strange}


def _stand_in_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shrinks the axes that may be cut, but not the experts on the first of three."""
    return tuple(
        size if len(shape) == 3 and axis == 0 else math.gcd(size, _CUTS)
        for axis, size in enumerate(shape)
    )


def _box(piece: np.ndarray, whole: np.ndarray) -> Box | None:
    if not whole.shape:
        return ()
    places = np.unravel_index(piece.ravel() - whole.min(), whole.shape)
    box = tuple(slice(int(at.min()), int(at.max()) + 1) for at in places)
    inside = whole[box]
    same = inside.size == piece.size and (inside.ravel() == piece.ravel()).all()
    return box if same else None


def _scale_box(box: Box, whole: np.ndarray, weight: torch.Tensor) -> Box:
    return tuple(
        slice(cut.start * size // small, cut.stop * size // small)
        for cut, small, size in zip(box, whole.shape, weight.shape, strict=True)
    )


def pieces_of(
    path: Path, boxes: Mapping[str, Box], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Piece, ...]:
    """Returns the pieces of a weight, none unless the files have all its parts.

    `shapes` are those of the stored tensors.
    """
    pieces = []
    for stored, box in boxes.items():
        lengths = tuple(cut.stop - cut.start for cut in box)
        is_entry = shapes.get(stored) == lengths[1:] and lengths[0] == 1
        if not is_entry and shapes.get(stored) != lengths:
            return ()
        inner = lengths[1:] if is_entry else lengths
        layout = same_axes(len(inner))
        pieces.append(
            Piece(
                source=stored,
                target=path,
                layout=layout,
                sizes=layout.sizes(inner, {}),
                entry=box[0].start if is_entry else None,
                window=box[1:] if is_entry else box,
            )
        )
    return tuple(pieces)
