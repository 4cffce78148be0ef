"""Layout of LoRA factors: torch's fused matrices against separate linear maps.

A is stored [rank, inputs], B [outputs, rank]. The maps that torch fuses into one matrix
are stacked along B's rows. If each has an A of its own, the A are stacked along the
rank, and each map's B has columns of its own:

    [B₁ 0 ] [A₁]
    [0  B₂] [A₂]
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jax.typing import ArrayLike

from dew.converters.lora.adapters import Part
from dew.converters.mapping.layout import Layout
from dew.converters.mapping.table import Piece
from dew.converters.save import on_host
from dew.nn.linear import FACTORS
from dew.typing import Path

INNER = "lora"
"""Name of the rank's axis in layouts."""


def stored_shapes(part: Part, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the stored shapes of A and B of the whole matrix."""
    piece = _piece(part, rank)
    block = piece.layout.block(piece.sizes)
    is_shared = piece.layout.shared_axis is not None
    rows = block[0] * piece.total if is_shared else block[0]
    return (rank, math.prod(part.adapter.site.inputs)), (rows, rank)


def split_factors(
    part: Part, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns one map's A and B, cut out of the whole matrix's."""
    piece = _piece(part, len(a))
    return _layouts(part)[0].to_variable(a, piece.sizes), piece.read(b)


def join_factors(
    parts: Sequence[Part], leaves: Mapping[Path, ArrayLike]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the whole matrix's A and B; of rank-sum size unless all maps share A."""
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
        columns = np.zeros((*b.shape[:-1], rank * count), b.dtype)
        start = 0 if is_shared else rank * i
        columns[..., start : start + rank] = b
        blocks.append((_piece(part, rank * count), columns))
    return np.concatenate(rows[:count]), _stack(blocks)


def _stack(blocks: Sequence[tuple[Piece, np.ndarray]]) -> np.ndarray:
    """Returns B of the whole matrix from its maps' rows; zeros where none has any."""
    first, values = blocks[0]
    rank = values.shape[-1]
    shared = first.layout.shared_axis
    if shared is None:
        return first.take(values).reshape(-1, rank)
    outer = math.prod(first.sizes[name] for name in first.layout.outer)
    stacked = np.zeros((outer, first.total, rank), values.dtype)
    for piece, values in blocks:
        stacked[:, piece.start : piece.stop] = piece.take(values)
    return stacked.reshape(-1, rank)


def is_transposed(part: Part) -> bool:
    """Whether torch stores the matrix as [inputs, outputs], as GPT-2's Conv1D does."""
    outputs = len(part.adapter.site.outputs)
    return not part.piece.layout.stored_outputs(outputs)[0]


def _layouts(part: Part) -> tuple[Layout, Layout]:
    return part.piece.layout.factors(len(part.adapter.site.outputs), INNER)


def _piece(part: Part, rank: int) -> Piece:
    """Returns the piece of the matrix's B that one map's B fills."""
    sizes = {**part.piece.sizes, INNER: rank}
    return replace(part.piece, layout=_layouts(part)[1], sizes=sizes)
