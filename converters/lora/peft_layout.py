"""The two factors of an adapter, as torch's matrix has them and as our maps do.

A is stored [rank, inputs], B [outputs, rank]. MultiUse maps that torch fuses into one
matrix stand below each other in B. Maps that have each an A of their own stand side by
side: their A's below each other, and each map's B in columns of its own,

    [B₁ 0 ] [A₁]
    [0  B₂] [A₂]
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dew.converters.lora.adapters import Part
from dew.converters.mapping.layout import Layout
from dew.converters.mapping.table import Piece
from dew.converters.save import on_host
from dew.nn.linear import FACTORS
from dew.typing import Path

INNER = "lora"
"""The name of the rank's axis in layouts."""


def form_of(part: Part, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes that A and B of the whole matrix are stored in."""
    piece = _piece(part, rank)
    block = piece.layout.block(piece.sizes)
    is_shared = piece.layout.shared_axis is not None
    rows = block[0] * piece.total if is_shared else block[0]
    return (rank, math.prod(part.adapter.site.inputs)), (rows, rank)


def split(part: Part, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One map's A and B out of the matrix's."""
    piece = _piece(part, len(a))
    return _layouts(part)[0].to_variable(a, piece.sizes), piece.read(b)


def joined(
    parts: Sequence[Part], leaves: Mapping[Path, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The matrix's A and B out of those of its maps; with one A if all share it."""
    pairs = [
        [on_host(leaves[(*p.adapter.site.path, name)]) for name in FACTORS]
        for p in parts
    ]
    rank = len(pairs[0][0])
    rows = [
        _layouts(p)[0].to_block(a, {**p.piece.sizes, INNER: rank})
        for p, (a, _) in zip(parts, pairs, strict=True)
    ]
    is_shared = all(np.array_equal(rows[0], other) for other in rows[1:])
    count = 1 if is_shared else len(parts)
    blocks = []
    for i, (part, (_, b)) in enumerate(zip(parts, pairs, strict=True)):
        whole = np.zeros((*b.shape[:-1], rank * count), b.dtype)
        start = 0 if is_shared else rank * i
        whole[..., start : start + rank] = b
        blocks.append((_piece(part, rank * count), whole))
    return np.concatenate(rows[:count]), _stacked(blocks)


def _stacked(blocks: Sequence[tuple[Piece, np.ndarray]]) -> np.ndarray:
    """B of the matrix: each map's rows where the matrix has them, zeros elsewhere."""
    first, values = blocks[0]
    rank = values.shape[-1]
    shared = first.layout.shared_axis
    if shared is None:
        return first.take(values).reshape(-1, rank)
    outer = math.prod(first.sizes[name] for name in first.layout.outer)
    found = np.zeros((outer, first.total, rank), values.dtype)
    for piece, values in blocks:
        found[:, piece.start : piece.stop] = piece.take(values)
    return found.reshape(-1, rank)


def is_transposed(part: Part) -> bool:
    """Whether torch stores the matrix inputs first, as GPT-2's Conv1D does."""
    outputs = len(part.adapter.site.outputs)
    return not part.piece.layout.stored_outputs(outputs)[0]


def _layouts(part: Part) -> tuple[Layout, Layout]:
    return part.piece.layout.factors(len(part.adapter.site.outputs), INNER)


def _piece(part: Part, rank: int) -> Piece:
    """The place of one map's B in the matrix's."""
    sizes = {**part.piece.sizes, INNER: rank}
    return replace(part.piece, layout=_layouts(part)[1], sizes=sizes)
