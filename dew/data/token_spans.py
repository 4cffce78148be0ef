"""Where two tokenizers cut the same text: positions that predict the same bytes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Encoding


class Aligned(NamedTuple):
    """Pairs of positions that predict the same stretch of bytes.

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
    """Pairs the positions of texts that two tokenizers have cut.

    Each side gives for every text the byte at which each of its tokens ends, -1 for
    specials and padding: see `byte_ends`. Rows are padded to the two lengths.
    """
    rows = [
        _align_row(ours[:student_len], theirs[:teacher_len], student_len, teacher_len)
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return Aligned(*(np.stack(column) for column in zip(*rows, strict=True)))


def byte_ends(text: str, encoding: Encoding) -> Int[np.ndarray, " seq"]:
    """The byte of `text` at which each token of its encoding ends; -1 for specials.

    Tokens that share one character all end where it does, so they fall in one span.
    """
    bytes_before = np.cumsum([0, *(len(char.encode()) for char in text)])
    ends = bytes_before[[end for _, end in encoding.offsets]]
    special = np.array(encoding.special_tokens_mask, bool)
    ends = np.maximum.accumulate(np.where(special, 0, ends)).astype(np.int32)
    return np.where(special, -1, ends).astype(np.int32)


def _align_row(
    ours: np.ndarray, theirs: np.ndarray, student_len: int, teacher_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    common = np.intersect1d(ours[ours >= 0], theirs[theirs >= 0])
    student_span = _spans(ours, common, student_len)
    teacher_span = _spans(theirs, common, teacher_len)
    ours_at, theirs_at = _firsts(student_span), _firsts(teacher_span)
    # The first token of a row is predicted by no position: its span is lost.
    lost = {int(_number(ours, common)), int(_number(theirs, common))}
    pairs = [s for s in ours_at if s in theirs_at and s not in lost]
    starts = np.zeros(student_len, bool)
    teacher_at = np.zeros(student_len, np.int32)
    for span in pairs:
        starts[ours_at[span]] = True
        teacher_at[ours_at[span]] = theirs_at[span]
    return starts, teacher_at, student_span, teacher_span


def _spans(ends: np.ndarray, common: np.ndarray, length: int) -> np.ndarray:
    """The span of the token that each position predicts, -1 where there is none."""
    span = np.searchsorted(common, ends).astype(np.int32)
    span = np.where((ends < 0) | (span == len(common)), -1, span)
    out = np.full(length, -1, np.int32)
    out[: len(span) - 1] = span[1:]
    return out


def _number(ends: np.ndarray, common: np.ndarray) -> int:
    if not len(ends) or ends[0] < 0:
        return -1
    return int(np.searchsorted(common, ends[0]))


def _firsts(span: np.ndarray) -> dict[int, int]:
    numbers, where = np.unique(span, return_index=True)
    return {int(n): int(i) for n, i in zip(numbers, where, strict=True) if n >= 0}
