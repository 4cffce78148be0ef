"""Resumable batches: documents in an order, tokenized, packed and stacked."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from os import PathLike
from typing import Any, TypeAlias, get_args

import grain
import numpy as np
from jaxtyping import Int32

from dew.data.packed_dataset import PackedRows
from dew.data.packing import Packing, Row, fill
from dew.data.tokenize import Encode
from dew.typing import Position

# Documents tokenized in one call.
_GROUP = 16
_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)

PackedBatch: TypeAlias = dict[str, Int32[np.ndarray, "batch seq"]]
"""`tokens`, `positions` and `segment_ids`."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Counts of what a stream has read and returned so far, over all shards.

    `documents` counts those read, once per epoch; `tokens` and `padding` count
    positions of the returned rows, without the rows that only fill the last batch.
    """

    documents: int
    tokens: int
    padding: int


class Batches(Iterator[PackedBatch]):
    """An iterator of packed batches whose exact position can be saved and restored.

    Each batch holds `tokens`, `positions` (from 0 in every segment) and `segment_ids`
    (from 1 in every row; 0 marks padding), int32 [batch, seq]. A position is the same
    in every shard, so a run may resume with another number of processes.
    """

    def __init__(
        self, dataset: grain.IterDataset, *, identity: Mapping[str, Any]
    ) -> None:
        self._iterator = iter(dataset)
        self._identity = dict(identity)

    def __next__(self) -> PackedBatch:
        return next(self._iterator)

    @property
    def trace(self) -> Trace:
        """Counts of what was read so far, before a resume included."""
        state = self._iterator.get_state()
        return Trace(
            documents=state["documents"],
            tokens=state["tokens"],
            padding=state["padding"],
        )

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch, as JSON can hold it."""
        return {"stream": self._identity, "position": self._iterator.get_state()}

    def set_state(self, state: Position) -> None:
        """Moves to a position that `get_state` gave, here or in another process.

        Raises:
            ValueError: it is the position of another stream, from other documents,
                another tokenizer, seed or packing; the differences are named.
        """
        saved = state["stream"]
        differences = [
            f"{name} was {saved.get(name)!r} and is {mine!r}"
            for name, mine in self._identity.items()
            if saved.get(name) != mine
        ]
        if differences:
            raise ValueError(
                "the saved data position belongs to another stream: "
                + "; ".join(differences)
                + "; resume with what the run was started with"
            )
        self._iterator.set_state(dict(state["position"]))


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The settings that training and evaluation share: all but the documents' order."""

    documents: tuple[Sequence[str], ...]
    encode: Encode
    seq_len: int
    batch_size: int
    packing: Packing
    shard: tuple[int, int]

    def faults(self) -> list[str]:
        """Lists the faults of the fields, empty where they are valid."""
        index, count = self.shard
        faults = [
            f"{name} must be at least 1, got {value}"
            for name, value in (
                ("seq_len", self.seq_len),
                ("batch_size", self.batch_size),
            )
            if value < 1
        ]
        if self.packing not in get_args(Packing):
            known = " or ".join(map(repr, get_args(Packing)))
            faults.append(f"packing must be {known}, got {self.packing!r}")
        if not 0 <= index < count:
            faults.append(
                "shard must be (index, count) with 0 <= index < count, "
                f"got {self.shard}"
            )
        elif self.batch_size % count:
            faults.append(
                f"batch_size counts the rows of all processes and must be a multiple "
                f"of their number: {self.batch_size} rows over {count} processes"
            )
        return faults + self._text_faults()

    def _text_faults(self) -> list[str]:
        if any(isinstance(part, str | PathLike) for part in self.documents):
            return [
                "documents must be a sequence of texts, got an address; "
                "open it: open_documents(address)"
            ]
        texts = (part[at] for part in self.documents for at in range(len(part)))
        if not any(len(self.encode([text])[0]) for text in texts):
            count = sum(map(len, self.documents))
            return [
                f"there is nothing to read: {count} documents, and no token in them"
            ]
        return []

    def batches(
        self, ordered: grain.MapDataset[str], order: Mapping[str, object]
    ) -> Batches:
        """Tokenizes `ordered` in threads, packs it and batches this shard's rows.

        `order` holds the settings that decided the order of the documents.
        """
        groups = ordered.batch(_GROUP, batch_fn=list).map(self.encode)
        tokens = groups.to_iter_dataset(_AHEAD)
        rows = PackedRows(tokens, seq_len=self.seq_len, packing=self.packing)
        index, count = self.shard
        share = self.batch_size // count
        stack = partial(
            _stack,
            seq_len=self.seq_len,
            span=range(index * share, (index + 1) * share),
            is_apart=self.packing == "apart",
        )
        dataset = rows.batch(self.batch_size, batch_fn=stack)
        return Batches(dataset, identity={**self._identity(), **order})

    def _identity(self) -> dict[str, Any]:
        """Identifies the stream: a position is valid in all streams with equal ones."""
        return {
            "documents": [len(part) for part in self.documents],
            "tokens": _sample_hash(self.documents, self.encode),
            "seq_len": self.seq_len,
            "packing": self.packing,
        }


def _stack(
    rows: Sequence[Row], *, seq_len: int, span: range, is_apart: bool
) -> PackedBatch:
    """Stacks this process's span of the global rows; those past the end are padding."""
    padding = fill((), seq_len)
    mine = [rows[at] if at < len(rows) else padding for at in span]
    batch = {name: np.stack([row[name] for row in mine]) for name in padding}
    if is_apart:
        return {"tokens": batch["tokens"], "mask": batch["segment_ids"]}
    return batch


def _sample_hash(documents: Sequence[Sequence[str]], encode: Encode) -> str:
    """Hashes a sample of tokens, which changes with the documents or the tokenizer."""
    digest = sha256()
    for part in documents:
        for at in sorted({len(part) * step // 8 for step in range(8)} if part else ()):
            digest.update(encode([part[at][:2000]])[0].tobytes())
    return digest.hexdigest()[:16]
