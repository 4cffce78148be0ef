"""Vocabularies proved to align, mapped, masked on both sides, or refused."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Whitespace

from dew.losses.divergences import ForwardKL, ReverseKL, ScaledJSD, SoftCrossEntropy
from dew.losses.scores import DenseScores
from dew.losses.sparse_scores import draw, top_k
from dew.losses.term import TermInputs
from dew.losses.vocabulary import VocabularyMap, align
from tests.support.tolerances import ATOL, RTOL

TOKENS = ("a", "b", "c", "d", "ab", "cd", "abcd")
MERGES = (("a", "b"), ("c", "d"), ("ab", "cd"))


def tokenizer(
    tokens: Sequence[str] = TOKENS,
    merges: Sequence[tuple[str, str]] = MERGES,
    added: Sequence[str] = (),
    pre: Any = None,
) -> Tokenizer:
    made = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, list(merges)))
    made.pre_tokenizer = pre or Whitespace()
    made.add_special_tokens(list(added))
    return made


def logits(rows: int, seed: int) -> Any:
    return jnp.asarray(2 * np.random.default_rng(seed).normal(size=(2, 3, rows)))


def probs(x: Any) -> np.ndarray:
    return np.asarray(jax.nn.softmax(x, axis=-1))


def test_equal_tokenizers_with_full_logits_are_identical() -> None:
    found = align(tokenizer(), tokenizer(), student_rows=7, teacher_rows=7)
    assert found.kind == "identical"
    assert "merges are equal" in found.report


def test_padded_rows_are_masked_on_both_sides() -> None:
    found = align(tokenizer(), tokenizer(), student_rows=8, teacher_rows=16)
    assert found.kind == "padded"
    assert found.report[-1] == "padded rows: student 1, teacher 9"
    real = logits(7, 0)
    student = jnp.concatenate([real, jnp.full((2, 3, 1), 50.0)], -1)
    teacher = jnp.concatenate([real, jnp.full((2, 3, 9), -3.0)], -1)
    for term in (ForwardKL(), ReverseKL(), ScaledJSD()):
        graded = jax.value_and_grad(
            lambda s, t=term: t.values(TermInputs(s, DenseScores(teacher, found))).sum()
        )
        value, slope = graded(student)
        assert abs(float(value)) <= ATOL["self float32"]
        assert float(jnp.abs(slope).max()) <= ATOL["self float32"]


def test_padding_the_student_with_zeros_instead_would_not_give_zero() -> None:
    real, rows = logits(7, 0), jnp.full((2, 3, 9), -3.0)
    padded = jnp.concatenate([real, jnp.zeros((2, 3, 9))], -1)
    teacher = DenseScores(jnp.concatenate([real, rows], -1))
    assert float(ForwardKL().values(TermInputs(padded, teacher)).min()) > 1e-2


def test_permuted_ids_are_put_in_the_students_order() -> None:
    order = [3, 0, 6, 2, 5, 1, 4]
    shuffled = tokenizer([TOKENS[i] for i in order])
    found = align(tokenizer(), shuffled, student_rows=7, teacher_rows=7)
    assert found.kind == "permuted"
    z, y = logits(7, 0), logits(7, 1)
    got = ForwardKL().values(
        TermInputs(y, DenseScores(z[..., jnp.asarray(order)], found))
    )
    np.testing.assert_allclose(
        got, ForwardKL().values(TermInputs(y, DenseScores(z))), rtol=RTOL["float32"]
    )
    np.testing.assert_array_equal(
        found.teacher_tokens(jnp.arange(7)), np.argsort(order)
    )


def test_specials_of_both_sides_become_one_more_class() -> None:
    ours, theirs = tokenizer(added=["<s>"]), tokenizer(added=["<x>", "<y>"])
    found = align(ours, theirs, student_rows=8, teacher_rows=12)
    assert (found.kind, found.num_classes) == ("shared", 8)
    z, y = logits(12, 0), logits(8, 1)
    p, q = probs(z[..., :9]), probs(y)
    p = np.concatenate([p[..., :7], p[..., 7:].sum(-1, keepdims=True)], -1)
    got = ForwardKL().values(TermInputs(y, DenseScores(z, found)))
    np.testing.assert_allclose(got, (p * np.log(p / q)).sum(-1), rtol=RTOL["float32"])
    unknown = found.class_of_student(jnp.asarray([6, 7]))
    np.testing.assert_array_equal(unknown, [6, -1])


def test_the_class_of_all_others_is_tempered_as_its_tokens_are() -> None:
    ours, theirs = tokenizer(added=["<s>", "<t>"]), tokenizer(added=["<x>", "<y>"])
    found = align(ours, theirs, student_rows=9, teacher_rows=9)
    z, y, t = logits(9, 0), logits(9, 1), 3.0
    merge = lambda p: np.concatenate(
        [p[..., :7], p[..., 7:].sum(-1, keepdims=True)], -1
    )
    p, q = merge(probs(z / t)), merge(probs(y / t))
    got = ForwardKL(temperature=t).values(TermInputs(y, DenseScores(z, found)))
    want = t**2 * (p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(got, want, rtol=RTOL["float32"])


def test_specials_of_one_side_alone_are_left_out_and_it_renormalises() -> None:
    found = align(tokenizer(), tokenizer(added=["<x>"]), student_rows=7, teacher_rows=8)
    z, y = logits(8, 0), logits(7, 1)
    got = ForwardKL().values(TermInputs(y, DenseScores(z, found)))
    want = ForwardKL().values(TermInputs(y, DenseScores(z[..., :7])))
    np.testing.assert_allclose(got, want, rtol=RTOL["float32"])


def test_sparse_teachers_are_mapped_as_dense_ones() -> None:
    order = [3, 0, 6, 2, 5, 1, 4]
    shuffled = tokenizer([TOKENS[i] for i in order], added=["<x>"])
    found = align(tokenizer(added=["<s>"]), shuffled, student_rows=8, teacher_rows=8)
    z, y = logits(8, 0), logits(8, 1)
    live = ForwardKL(top=8).values(TermInputs(y, DenseScores(z, found)))
    stored = replace(top_k(z, 8), vocabulary=found)
    got = ForwardKL().values(TermInputs(y, stored))
    np.testing.assert_allclose(got, live, rtol=RTOL["float32"])
    drawn = replace(draw(jax.random.key(0), z, 5), vocabulary=found)
    classes = np.asarray(found.class_of_teacher(drawn.ids))
    log_q = np.log(probs(found.student_classes(y)))
    picked = np.take_along_axis(log_q, np.maximum(classes, 0), -1)
    want = -(np.where(classes < 0, 0, np.asarray(drawn.weights)) * picked).sum(-1)
    np.testing.assert_allclose(
        SoftCrossEntropy().values(TermInputs(y, drawn)), want, rtol=RTOL["float32"]
    )


REFUSED: Mapping[str, tuple[Callable[[], VocabularyMap], str]] = {
    "cut": (
        lambda: align(
            tokenizer(pre=ByteLevel()), tokenizer(), student_rows=7, teacher_rows=7
        ),
        "normaliser, pre-tokenizer or model settings differ",
    ),
    "merges": (
        lambda: align(
            tokenizer(merges=MERGES[:2]), tokenizer(), student_rows=7, teacher_rows=7
        ),
        "merges differ, so the same text may be cut differently",
    ),
    "tokens": (
        lambda: align(
            tokenizer(TOKENS[:6], MERGES[:2]),
            tokenizer(),
            student_rows=6,
            teacher_rows=7,
        ),
        "1 tokens that text can produce are only the teacher's, as 'abcd'",
    ),
    "rows": (
        lambda: align(tokenizer(), tokenizer(), student_rows=6, teacher_rows=7),
        "the student's logits have 6 rows, its tokenizer uses id 6",
    ),
    "evidence against": (
        lambda: align(
            tokenizer(merges=MERGES[:2]),
            tokenizer(),
            student_rows=7,
            teacher_rows=7,
            texts=["ab cd", "abcd"],
        ),
        "merges differ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proved_is_refused_with_the_whole_report(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as refused:
        make()
    assert "student" in str(refused.value)
    assert "shared" in str(refused.value)


def test_texts_are_evidence_where_only_merges_differ() -> None:
    found = align(
        tokenizer(merges=MERGES[:2]),
        tokenizer(),
        student_rows=7,
        teacher_rows=7,
        texts=["ab cd", "a b"],
    )
    assert any("cut 2 texts into the same 4 tokens" in line for line in found.report)


def test_logits_of_another_size_than_the_map_was_made_for_are_refused() -> None:
    found = align(tokenizer(), tokenizer(), student_rows=8, teacher_rows=7)
    with pytest.raises(
        ValueError, match=r"student.s logits have 7 rows, .* made for 8"
    ):
        ForwardKL().values(TermInputs(logits(7, 0), DenseScores(logits(7, 1), found)))
