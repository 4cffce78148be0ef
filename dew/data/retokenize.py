"""The text of token batches again, in the tokens of another tokenizer."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tokenizers import Tokenizer

from dew.data.token_spans import align_spans, byte_ends

RESPELLED = (
    "respelled_tokens",
    "respelled_positions",
    "respelled_segments",
    "span_starts",
    "span_teacher_at",
    "span_of_student",
    "span_of_teacher",
)
"""What a batch gets: the other tokens, and `dew.data.token_spans.Aligned` of both."""

GAP = 1
"""Bytes between documents, so that one's end is not the next one's start."""


@runtime_checkable
class Positioned(Protocol):
    """A stream of batches that knows where it stands."""

    def __next__(self) -> Mapping[str, Any]:
        """The next batch."""
        ...

    def get_state(self) -> dict[str, Any]:
        """The position after it."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position."""
        ...


class Respelled(Iterator[dict[str, Any]]):
    """Batches of one tokenizer with the same text in another's tokens beside them.

    Rows keep their documents, segment by segment; what does not fit `seq_len` of the
    other tokens is left out of the comparison. So are the special tokens, and a
    document whose text does not give its tokens back, as where a row was cut within a
    character.
    """

    def __init__(
        self,
        data: Positioned,
        *,
        student: Tokenizer,
        teacher: Tokenizer,
        seq_len: int,
    ) -> None:
        if seq_len < 2:
            raise ValueError(f"seq_len must be at least 2, got {seq_len}")
        self._data, self._seq_len = data, seq_len
        self._student, self._teacher = student, teacher
        added = student.get_added_tokens_decoder()
        self._special = np.array([i for i, one in added.items() if one.special], int)

    def __next__(self) -> dict[str, Any]:
        batch = next(self._data)
        tokens = np.asarray(batch["tokens"])
        rows = [
            self._row(ids, segments)
            for ids, segments in zip(tokens, _segments(batch), strict=True)
        ]
        others, ours, theirs = zip(*rows, strict=True)
        spans = align_spans(
            ours, theirs, student_len=tokens.shape[1], teacher_len=self._seq_len
        )
        arrays = (*(np.stack(one) for one in zip(*others, strict=True)), *spans)
        return {**batch, **dict(zip(RESPELLED, arrays, strict=True))}

    def get_state(self) -> dict[str, Any]:
        """The position of the batches underneath."""
        return self._data.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position."""
        self._data.set_state(state)

    def _row(
        self, ids: np.ndarray, segments: np.ndarray
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
        """The other tokens with positions and segments, and both sides' byte ends."""
        ours = np.full(len(ids), -1, np.int32)
        width, start = self._seq_len, 0
        tokens, positions, numbers, theirs = [], [], [], []
        for number in np.unique(segments[segments > 0]):
            place = np.flatnonzero(segments == number)
            place = place[~np.isin(ids[place], self._special)]
            text = self._student.decode(ids[place].tolist(), skip_special_tokens=False)
            again = self._student.encode(text, add_special_tokens=False)
            if not len(place) or again.ids != ids[place].tolist():
                continue
            other = self._teacher.encode(text, add_special_tokens=False)
            ours[place] = _shifted(byte_ends(text, again), start)
            theirs.append(_shifted(byte_ends(text, other), start))
            tokens.append(np.array(other.ids, np.int32))
            positions.append(np.arange(len(other.ids), dtype=np.int32))
            numbers.append(np.full(len(other.ids), number, np.int32))
            start += len(text.encode()) + GAP
        padded = tuple(_padded(part, width, 0) for part in (tokens, positions, numbers))
        return padded, ours, _padded(theirs, width, -1)


def _segments(batch: Mapping[str, Any]) -> np.ndarray:
    """The document of every token, 0 for padding."""
    real = np.ones(np.shape(batch["tokens"]), bool)
    if "mask" in batch:
        real = np.asarray(batch["mask"], bool)
    segments = np.asarray(batch.get("segment_ids", real), np.int32)
    return np.where(real, segments, 0)


def _shifted(ends: np.ndarray, start: int) -> np.ndarray:
    return np.where(ends < 0, -1, ends + start).astype(np.int32)


def _padded(parts: list[np.ndarray], width: int, value: int) -> np.ndarray:
    row = np.full(width, value, np.int32)
    whole = np.concatenate([np.zeros(0, np.int32), *parts])[:width]
    row[: len(whole)] = whole
    return row
