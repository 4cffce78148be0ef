"""Batches with the same text in the tokens of a second tokenizer."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tokenizers import Tokenizer

from dew.data.token_spans import align_spans, byte_ends
from dew.typing import Position

RESPELLED = (
    "respelled_tokens",
    "respelled_positions",
    "respelled_segments",
    "span_starts",
    "span_teacher_at",
    "span_of_student",
    "span_of_teacher",
)
"""The added arrays: the other tokens, and `dew.data.token_spans.Aligned` of both."""

GAP = 1
"""Bytes between documents, so that the end of one is not the start of the next."""


@runtime_checkable
class Positioned(Protocol):
    """A stream of batches whose position can be saved and restored."""

    def __next__(self) -> Mapping[str, Any]:
        """Returns the next batch of the stream."""
        ...

    def get_state(self) -> dict[str, object]:
        """Returns the position after the last batch."""
        ...

    def set_state(self, state: Position) -> None:
        """Moves to a position that `get_state` returned."""
        ...


class Retokenized(Iterator[dict[str, Any]]):
    """Batches of a student's tokens, with the same text in a teacher's tokens.

    Rows keep their documents, segment by segment. Left out of the alignment are
    teacher tokens beyond `seq_len`, special tokens, and documents whose decoded text
    does not encode to the same tokens, as where a row was cut within a character.
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
        others, student_ends, teacher_ends = zip(*rows, strict=True)
        spans = align_spans(
            student_ends,
            teacher_ends,
            student_len=tokens.shape[1],
            teacher_len=self._seq_len,
        )
        arrays = (*(np.stack(one) for one in zip(*others, strict=True)), *spans)
        return {**batch, **dict(zip(RESPELLED, arrays, strict=True))}

    def get_state(self) -> dict[str, object]:
        """Returns the position of the student's batches."""
        return self._data.get_state()

    def set_state(self, state: Position) -> None:
        """Moves to a position that `get_state` returned."""
        self._data.set_state(state)

    def _row(
        self, ids: np.ndarray, segments: np.ndarray
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
        """Returns tokens, positions, segments, and the byte ends of both sides."""
        student_ends = np.full(len(ids), -1, np.int32)
        width, start = self._seq_len, 0
        tokens, positions, numbers, teacher_ends = [], [], [], []
        for number in np.unique(segments[segments > 0]):
            place = np.flatnonzero(segments == number)
            place = place[~np.isin(ids[place], self._special)]
            text = self._student.decode(ids[place].tolist(), skip_special_tokens=False)
            again = self._student.encode(text, add_special_tokens=False)
            if not len(place) or again.ids != ids[place].tolist():
                continue
            other = self._teacher.encode(text, add_special_tokens=False)
            student_ends[place] = _shift(byte_ends(text, again), start)
            teacher_ends.append(_shift(byte_ends(text, other), start))
            tokens.append(np.array(other.ids, np.int32))
            positions.append(np.arange(len(other.ids), dtype=np.int32))
            numbers.append(np.full(len(other.ids), number, np.int32))
            start += len(text.encode()) + GAP
        padded = tuple(_pad(part, width, 0) for part in (tokens, positions, numbers))
        return padded, student_ends, _pad(teacher_ends, width, -1)


def _segments(batch: Mapping[str, Any]) -> np.ndarray:
    """Returns the number of every token's document, 0 for padding."""
    real = np.ones(np.shape(batch["tokens"]), bool)
    if "mask" in batch:
        real = np.asarray(batch["mask"], bool)
    segments = np.asarray(batch.get("segment_ids", real), np.int32)
    return np.where(real, segments, 0)


def _shift(ends: np.ndarray, start: int) -> np.ndarray:
    return np.where(ends < 0, -1, ends + start).astype(np.int32)


def _pad(parts: list[np.ndarray], width: int, value: int) -> np.ndarray:
    row = np.full(width, value, np.int32)
    values = np.concatenate([np.zeros(0, np.int32), *parts])[:width]
    row[: len(values)] = values
    return row
