"""A grain dataset that packs a stream of documents into rows.

Rows are packed one window of documents at a time, so that a position in the stream is
three numbers: the position where the window starts, the number of tokens of its first
group of documents that an earlier window used, and the number of its rows given out.
"""

from collections.abc import Sequence
from typing import Any

import grain

from dew.data.packing import STRATEGIES, Packing, Row, Strategy, fill
from dew.data.tokenize import Tokens
from dew.typing import Position


class PackedRows(grain.IterDataset):
    """Rows of `seq_len` from a dataset of groups of documents, without empty ones."""

    def __init__(
        self, parent: grain.IterDataset, *, seq_len: int, packing: Packing
    ) -> None:
        super().__init__(parent)
        self._seq_len = seq_len
        self._strategy = STRATEGIES[packing]

    def __iter__(self) -> grain.DatasetIterator:
        return _PackedRowsIterator(
            iter(self._parent), seq_len=self._seq_len, strategy=self._strategy
        )


class _PackedRowsIterator(grain.DatasetIterator):
    """Packs window after window; its state is JSON values and holds no tokens.

    Grain's own concat-then-split iterator is not used: its state holds tuples, and
    once JSON has made them lists it mistakes an empty remainder for a document and
    drops one.
    """

    def __init__(
        self, parent: grain.DatasetIterator, *, seq_len: int, strategy: Strategy
    ) -> None:
        super().__init__(parent)
        self._seq_len = seq_len
        self._strategy = strategy
        self._rows: Sequence[Sequence[Tokens]] = ()
        self._row = self._tokens = self._padding = 0
        self._start: Position = {}
        self._seek({"parent": parent.get_state(), "skip": 0, "documents": 0})

    def __next__(self) -> Row:
        if self._row == len(self._rows):
            self._open_window()
        row = self._rows[self._row]
        self._row += 1
        used = sum(map(len, row))
        self._tokens += used
        self._padding += self._seq_len - used
        return fill(row, self._seq_len)

    def get_state(self) -> dict[str, Any]:
        is_spent = self._row == len(self._rows)
        return {
            "window": dict(self._next_start if is_spent else self._start),
            "row": 0 if is_spent else self._row,
            "documents": self._next_start["documents"],
            "tokens": self._tokens,
            "padding": self._padding,
        }

    def set_state(self, state: Position) -> None:
        self._parent.set_state(state["window"]["parent"])
        self._seek(dict(state["window"]))
        self._tokens, self._padding = state["tokens"], state["padding"]
        if state["row"]:
            self._open_window()
            self._row = state["row"]

    def _seek(self, start: Position) -> None:
        """Starts the next window at `start`, the parent's current position."""
        self._rows, self._row, self._next_start = (), 0, start
        skip = start["skip"]
        self._carry = _after(next(self._parent), skip) if skip else []

    def _open_window(self) -> None:
        """Reads groups of documents until the window is full, and packs them.

        Raises:
            StopIteration: no token is left.
        """
        start = self._next_start
        # Group by group, so that the state before the last group is known: the tokens
        # left over are found again by reading that one group, and none are saved.
        before, count = start["parent"], start["documents"]
        documents = list(self._carry)
        total = last = sum(map(len, documents))
        is_last = False
        while total < self._strategy.window_rows * self._seq_len:
            here = self._parent.get_state()
            group = next(self._parent, None)
            if group is None:
                is_last = True
                break
            documents += group
            last = sum(map(len, group))
            total += last
            before, count = here, count + len(group)
        if not total:
            raise StopIteration
        # Only the last window of all may hold a row that is not full.
        window = self._strategy.pack(documents, self._seq_len, is_last)
        self._start, self._rows, self._row = start, window.rows, 0
        # Less than a row is left over, and a window ends with the first group that
        # fills it: the leftover tokens are of that last group, never of the carry.
        self._carry = _after(documents, total - window.rest)
        if window.rest:
            following = {"parent": before, "skip": last - window.rest}
        else:
            following = {"parent": self._parent.get_state(), "skip": 0}
        self._next_start = {**following, "documents": count}


def _after(documents: Sequence[Tokens], skip: int) -> list[Tokens]:
    """Returns the documents without their first `skip` tokens."""
    rest = []
    for tokens in documents:
        if skip < len(tokens):
            rest.append(tokens[skip:])
        skip = max(skip - len(tokens), 0)
    return rest
