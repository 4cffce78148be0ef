"""Which rows of a teacher's logits mean the same token as which rows of a student's."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from dew.losses.logspace import Scalar, widened

Kind = Literal["identical", "padded", "permuted", "shared"]


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabularyMap:
    """Common classes of two sets of logits: row `student_ids[c]` is `teacher_ids[c]`.

    Rows in neither list are not compared. Padded rows are no tokens and are dropped, so
    both sides renormalise over real tokens. Where *both* sides have tokens that the
    other lacks (`student_rest`, `teacher_rest`), those form one more class on each
    side, after all others; where only one side has, it renormalises too, because a
    class that the other side can never choose makes every divergence from it infinite.

    Compared by identity, so that it can be static in a compiled step. `report` says in
    sentences what was proved, and how.
    """

    kind: Kind
    student_ids: np.ndarray
    teacher_ids: np.ndarray
    student_rest: np.ndarray
    teacher_rest: np.ndarray
    student_rows: int
    teacher_rows: int
    report: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """The number of common classes, with the class of all other tokens."""
        return len(self.student_ids) + self._has_rest

    def student_classes(
        self, logits: Float[Array, "*batch rows"], temperature: Scalar = 1.0
    ) -> Float[Array, "*batch classes"]:
        """The student's logits over the common classes."""
        _check_rows("student", logits.shape[-1], self.student_rows)
        rest = self.student_rest if self._has_rest else self.student_rest[:0]
        return _classes(logits, self.student_ids, rest, temperature)

    def teacher_classes(
        self, logits: Float[Array, "*batch rows"], temperature: Scalar = 1.0
    ) -> Float[Array, "*batch classes"]:
        """The teacher's logits over the common classes."""
        _check_rows("teacher", logits.shape[-1], self.teacher_rows)
        rest = self.teacher_rest if self._has_rest else self.teacher_rest[:0]
        return _classes(logits, self.teacher_ids, rest, temperature)

    def class_of_teacher(self, ids: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
        """The common class of each teacher token; -1 where the student has none."""
        return _lookup(self.teacher_ids, self.teacher_rows)[ids]

    def class_of_student(self, ids: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
        """The common class of each student token; -1 where the teacher has none."""
        return _lookup(self.student_ids, self.student_rows)[ids]

    def teacher_tokens(self, ids: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
        """The same text for the teacher; -1 where it has no such token."""
        known = self.class_of_student(ids)
        return jnp.where(known < 0, -1, jnp.asarray(self.teacher_ids)[known])

    @property
    def _has_rest(self) -> bool:
        return bool(len(self.student_rest) and len(self.teacher_rest))


def align(
    student: Tokenizer,
    teacher: Tokenizer,
    *,
    student_rows: int,
    teacher_rows: int,
    texts: Sequence[str] = (),
) -> VocabularyMap:
    """Maps a teacher's logits to a student's, if the tokenizers prove that they agree.

    Proved means: both split and normalise text alike, merge alike, and every token that
    one of them can produce from text is a token of the other, under whatever id. Tokens
    that were only added (specials) may differ. `texts` are evidence where proof fails
    for the merges alone: if both cut every one of them into the same tokens, the map is
    accepted and its report says so.

    Args:
        student: the student's tokenizer.
        teacher: the teacher's tokenizer.
        student_rows: how many rows the student's logits have.
        teacher_rows: how many rows the teacher's logits have.
        texts: texts to try both tokenizers on.

    Raises:
        ValueError: alignment was not proved; the message is the whole report.
    """
    ours, theirs = _Vocabulary.of(student), _Vocabulary.of(teacher)
    report, faults = _compare(ours, theirs, _evidence(student, teacher, texts))
    faults += _overflow("student", ours, student_rows)
    faults += _overflow("teacher", theirs, teacher_rows)
    if faults:
        raise ValueError(
            "the vocabularies could not be proved to align: "
            + "; ".join(faults)
            + ". Use ULD across tokenizers, or give `texts` as evidence where only the "
            "merges differ. Found: " + "; ".join(report)
        )
    return _mapped(ours, theirs, student_rows, teacher_rows, report)


@dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    ids: Mapping[str, int]
    added: frozenset[str]
    pipeline: str
    merges: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "_Vocabulary":
        spec: dict[str, Any] = json.loads(tokenizer.to_str())
        model = dict(spec["model"])
        base = model.pop("vocab", None)
        merges = model.pop("merges", None)
        ids = tokenizer.get_vocab(with_added_tokens=True)
        plain = tokenizer.get_vocab(with_added_tokens=False)
        # A Unigram's scores decide how it cuts, as merges do a BPE's.
        scores = base if isinstance(base, list) else None
        return cls(
            ids=ids,
            added=frozenset(ids) - frozenset(plain),
            pipeline=json.dumps(
                [spec["normalizer"], spec["pre_tokenizer"], model], sort_keys=True
            ),
            merges=json.dumps([merges, scores], sort_keys=True),
        )


def _evidence(
    student: Tokenizer, teacher: Tokenizer, texts: Sequence[str]
) -> str | None:
    """Says that both cut every text alike; None without texts, or where one differs."""
    total = 0
    for text in texts:
        ours = student.encode(text, add_special_tokens=False).tokens
        if ours != teacher.encode(text, add_special_tokens=False).tokens:
            return None
        total += len(ours)
    return (
        f"both cut {len(texts)} texts into the same {total} tokens" if total else None
    )


def _compare(
    ours: _Vocabulary, theirs: _Vocabulary, evidence: str | None
) -> tuple[list[str], list[str]]:
    shared = ours.ids.keys() & theirs.ids.keys()
    report = [
        f"student {len(ours.ids)} tokens, teacher {len(theirs.ids)}, "
        f"shared {len(shared)}",
    ]
    faults = []
    if ours.pipeline == theirs.pipeline:
        report.append("normaliser, pre-tokenizer and model settings are equal")
    else:
        faults.append("normaliser, pre-tokenizer or model settings differ")
    if ours.merges == theirs.merges:
        report.append("merges are equal")
    elif evidence is not None:
        report.append(f"merges differ, but {evidence}")
    else:
        faults.append("merges differ, so the same text may be cut differently")
    for side, one, other in (("student", ours, theirs), ("teacher", theirs, ours)):
        lone = sorted(one.ids.keys() - other.ids.keys() - one.added)
        if lone and evidence is None:
            faults.append(
                f"{len(lone)} tokens that text can produce are only the {side}'s, as "
                f"{', '.join(map(repr, lone[:3]))}"
            )
    return report, faults


def _overflow(side: str, vocabulary: _Vocabulary, rows: int) -> list[str]:
    top = max(vocabulary.ids.values(), default=-1)
    if top < rows:
        return []
    return [f"the {side}'s logits have {rows} rows, its tokenizer uses id {top}"]


def _mapped(
    ours: _Vocabulary,
    theirs: _Vocabulary,
    student_rows: int,
    teacher_rows: int,
    report: list[str],
) -> VocabularyMap:
    shared = sorted(ours.ids.keys() & theirs.ids.keys(), key=ours.ids.__getitem__)
    student_ids = np.array([ours.ids[token] for token in shared], np.int32)
    teacher_ids = np.array([theirs.ids[token] for token in shared], np.int32)
    student_rest = np.setdiff1d(np.array([*ours.ids.values()], np.int32), student_ids)
    teacher_rest = np.setdiff1d(np.array([*theirs.ids.values()], np.int32), teacher_ids)
    rows = max(student_rows, teacher_rows)
    kind: Kind = "identical"
    if len(student_rest) or len(teacher_rest):
        kind = "shared"
    elif not np.array_equal(student_ids, teacher_ids):
        kind = "permuted"
    elif len(shared) < rows:
        kind = "padded"
    padding = (
        f"padded rows: student {student_rows - len(ours.ids)}, "
        f"teacher {teacher_rows - len(theirs.ids)}"
    )
    return VocabularyMap(
        kind=kind,
        student_ids=student_ids,
        teacher_ids=teacher_ids,
        student_rest=student_rest,
        teacher_rest=teacher_rest,
        student_rows=student_rows,
        teacher_rows=teacher_rows,
        report=(f"kind: {kind}", *report, padding),
    )


def _classes(
    logits: Array, ids: np.ndarray, rest: np.ndarray, temperature: Scalar
) -> Array:
    wide = widened(logits)
    # A slice costs nothing where the ids are a prefix, as in the padded case.
    is_prefix = np.array_equal(ids, np.arange(len(ids)))
    kept = wide[..., : len(ids)] if is_prefix else jnp.take(wide, ids, axis=-1)
    if not len(rest):
        return kept
    t = jnp.asarray(temperature, wide.dtype)
    other = t * jax.nn.logsumexp(jnp.take(wide, rest, axis=-1) / t, axis=-1)
    return jnp.concatenate([kept, other[..., None]], axis=-1)


def _lookup(ids: np.ndarray, rows: int) -> Array:
    table = np.full(rows, -1, np.int32)
    table[ids] = np.arange(len(ids), dtype=np.int32)
    return jnp.asarray(table)


def _check_rows(side: str, found: int, rows: int) -> None:
    if found != rows:
        raise ValueError(
            f"the {side}'s logits have {found} rows, its vocabulary map was made for "
            f"{rows}; align again with {side}_rows={found}"
        )
