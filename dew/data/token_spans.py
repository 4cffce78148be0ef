"""Alignment of two tokenizations: positions that predict the same bytes of a text."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Encoding


class Aligned(NamedTuple):
    """Pairs of positions that predict the same span of bytes.

    A position predicts the token after it. `starts` marks the student's positions that
    predict the first token of a span, `teacher_at` is the teacher's position that
    predicts the same span (0 elsewhere), and `student_span`, `teacher_span` number the
    span that each position's token belongs to, -1 for none.
    """

    starts: Bool[np.ndarray, "batch seq"]
    teacher_at: Int[np.ndarray, "batch seq"]
    student_span: Int[np.ndarray, "batch seq"]
    teacher_span: Int[np.ndarray, "batch seq2"]


def align_spans(
    student: Sequence[Int[np.ndarray, " seq"]],
    teacher: Sequence[Int[np.ndarray, " seq2"]],
    *,
    student_len: int,
    teacher_len: int,
) -> Aligned:
    """Pairs the positions of two tokenizations of the same texts.

    `student` and `teacher` hold for every text the byte at which each token ends, -1
    for specials and padding, as from `byte_ends`. Rows are padded to the two lengths.

    Here the second token of the student ends with the third of the teacher, so that
    both sides predict bytes 2 to 5 from their position before:

    >>> import numpy as np
    >>> aligned = align_spans(
    ...     [np.array([2, 5])], [np.array([2, 4, 5])], student_len=2, teacher_len=3
    ... )
    >>> aligned.starts.tolist(), aligned.teacher_at.tolist()
    ([[True, False]], [[0, 0]])
    >>> aligned.teacher_span.tolist()
    [[1, 1, -1]]
    """
    rows = [
        _align_row(ends[:student_len], others[:teacher_len], student_len, teacher_len)
        for ends, others in zip(student, teacher, strict=True)
    ]
    return Aligned(*(np.stack(column) for column in zip(*rows, strict=True)))


def byte_ends(text: str, encoding: Encoding) -> Int[np.ndarray, " seq"]:
    """Returns the byte of `text` at which each token ends; -1 for specials.

    Tokens that share one character all end where it does, so they are in one span.
    """
    # Offsets count characters, and two tokenizers agree on bytes only.
    bytes_before = np.cumsum([0, *(len(char.encode()) for char in text)])
    ends = bytes_before[[end for _, end in encoding.offsets]]
    special = np.array(encoding.special_tokens_mask, bool)
    # Never decreasing: a normalizer may give a token an empty offset, which would start
    # a span backwards.
    ends = np.maximum.accumulate(np.where(special, 0, ends)).astype(np.int32)
    return np.where(special, -1, ends).astype(np.int32)


def _align_row(
    student: np.ndarray, teacher: np.ndarray, student_len: int, teacher_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    # A span ends where a token of both sides ends; between two such bytes the tokens
    # differ, and only the product of their probabilities can be compared.
    common = np.intersect1d(student[student >= 0], teacher[teacher >= 0])
    student_span = _spans(student, common, student_len)
    teacher_span = _spans(teacher, common, teacher_len)
    student_at, teacher_first = _firsts(student_span), _firsts(teacher_span)
    # The first token of a row is predicted by no position: its span is left out.
    unpredicted = {_first_span(student, common), _first_span(teacher, common)}
    pairs = [
        span for span in student_at if span in teacher_first and span not in unpredicted
    ]
    starts = np.zeros(student_len, bool)
    teacher_at = np.zeros(student_len, np.int32)
    for span in pairs:
        starts[student_at[span]] = True
        teacher_at[student_at[span]] = teacher_first[span]
    return starts, teacher_at, student_span, teacher_span


def _spans(ends: np.ndarray, common: np.ndarray, length: int) -> np.ndarray:
    """Returns the span of the token that each position predicts, -1 for none."""
    span = np.searchsorted(common, ends).astype(np.int32)
    span = np.where((ends < 0) | (span == len(common)), -1, span)
    out = np.full(length, -1, np.int32)
    # Shifted by one: a position predicts the token after it.
    out[: len(span) - 1] = span[1:]
    return out


def _first_span(ends: np.ndarray, common: np.ndarray) -> int:
    if not len(ends) or ends[0] < 0:
        return -1
    return int(np.searchsorted(common, ends[0]))


def _firsts(span: np.ndarray) -> dict[int, int]:
    numbers, where = np.unique(span, return_index=True)
    return {int(n): int(i) for n, i in zip(numbers, where, strict=True) if n >= 0}
