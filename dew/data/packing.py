"""Packing strategies, which turn documents of any length into rows of one length.

A *piece* is a document or a part of one; it becomes one segment of a row.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Int32

from dew.data.tokenize import Tokens

Packing: TypeAlias = Literal["wrapped", "best_fit", "apart"]
"""The name of a packing strategy.

`wrapped` joins documents and cuts every `seq_len` tokens: no padding, and a document
that crosses a cut continues in the next row as another segment. `best_fit` splits only
the documents longer than a row, and leaves a little padding. `apart` gives every
document its own rows, with a `mask` in place of segments and positions: for models
without support for several documents in a row.
"""

Row: TypeAlias = Mapping[str, Int32[np.ndarray, "seq"]]


@dataclass(frozen=True, kw_only=True)
class PackWindow:
    """Rows as lists of pieces, and the number of tokens at the end in no row yet."""

    rows: Sequence[Sequence[Tokens]]
    rest: int = 0


def wrap(documents: Sequence[Tokens], seq_len: int, is_last: bool) -> PackWindow:
    """Fills rows completely, in order; only the last window may leave a row short."""
    rows: list[list[Tokens]] = [[]]
    room = seq_len
    for tokens in documents:
        while len(tokens):
            rows[-1].append(tokens[:room])
            tokens, room = tokens[room:], room - len(rows[-1][-1])
            if not room:
                rows.append([])
                room = seq_len
    # The open row waits for the next window's documents, unless there are none.
    if is_last:
        return PackWindow(rows=[row for row in rows if row])
    return PackWindow(rows=rows[:-1], rest=seq_len - room)


def best_fit(documents: Sequence[Tokens], seq_len: int, is_last: bool) -> PackWindow:
    """Puts each piece, longest first, into the fullest row that has room for it.

    Best-fit decreasing: D. S. Johnson, "Near-optimal bin packing algorithms" (1973).
    Rows are in the order of the earliest document in each.
    """
    pieces = [
        tokens[start : start + seq_len]
        for tokens in documents
        for start in range(0, len(tokens), seq_len)
    ]
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index in sorted(range(len(pieces)), key=lambda index: -len(pieces[index])):
        size = len(pieces[index])
        # `rooms` is sorted by free tokens, then row: the first entry from (size, 0) on
        # is the fullest row that has room.
        at = bisect_left(rooms, (size, 0))
        if at == len(rooms):
            room, row = seq_len, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(at)
        rows[row].append(index)
        insort(rooms, (room - size, row))
    # Back in the order of the stream, which packing by length has lost.
    in_order = sorted(sorted(row) for row in rows)
    return PackWindow(rows=[[pieces[index] for index in row] for row in in_order])


def apart(documents: Sequence[Tokens], seq_len: int, is_last: bool) -> PackWindow:
    """Puts each piece into a row of its own."""
    return PackWindow(
        rows=[
            [tokens[start : start + seq_len]]
            for tokens in documents
            for start in range(0, len(tokens), seq_len)
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A packing function, and the size of its windows in rows of tokens."""

    pack: Callable[[Sequence[Tokens], int, bool], PackWindow]
    # More rows pack tighter and start later: with 64
    # about 1 % of a row is padding on documents of mixed length.
    window_rows: int


STRATEGIES: Mapping[Packing, Strategy] = {
    "wrapped": Strategy(pack=wrap, window_rows=1),
    "best_fit": Strategy(pack=best_fit, window_rows=64),
    "apart": Strategy(pack=apart, window_rows=1),
}


def fill(pieces: Sequence[Tokens], seq_len: int) -> Row:
    """Joins pieces to a row; the rest of the row is padding, segment 0."""
    lengths = np.asarray([len(piece) for piece in pieces], np.int32)
    used = int(lengths.sum())
    row = {
        name: np.zeros(seq_len, np.int32)
        for name in ("tokens", "positions", "segment_ids")
    }
    if pieces:
        starts = np.cumsum(lengths) - lengths
        row["tokens"][:used] = np.concatenate(pieces)
        row["positions"][:used] = np.arange(used) - np.repeat(starts, lengths)
        row["segment_ids"][:used] = np.repeat(np.arange(1, len(pieces) + 1), lengths)
    return row
