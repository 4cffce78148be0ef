"""ULD on one tokenizer and across two, against loops over the same text."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dew.data.token_spans import align_spans, byte_ends
from dew.losses.divergences import ForwardKL
from dew.losses.scores import DenseScores
from dew.losses.term import TermInputs
from dew.losses.uld import ULD, Spans, SpanScores
from tests.support.tolerances import ATOL, RTOL, SLOPE


def random_logits(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(2 * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def probs(x: Any) -> np.ndarray:
    return np.asarray(jax.nn.softmax(x, axis=-1), np.float64)


def ranked_distance(p: np.ndarray, q: np.ndarray) -> float:
    width = max(len(p), len(q))
    p, q = (np.sort(np.pad(x, (0, width - len(x))))[::-1] for x in (p, q))
    return float(np.abs(p - q).sum())


def test_the_distance_is_over_ranks_and_pads_the_shorter() -> None:
    y, z = random_logits(2, 3, 9), random_logits(2, 3, 12, seed=1)
    got = ULD(temperature=2.0).values(TermInputs(y, DenseScores(z)))
    flat = zip(probs(z / 2).reshape(-1, 12), probs(y / 2).reshape(-1, 9), strict=True)
    want = np.reshape([ranked_distance(p, q) for p, q in flat], (2, 3))
    np.testing.assert_allclose(got, want, rtol=RTOL["float32"])


def test_relabelling_changes_nothing_and_a_relabelled_self_is_at_distance_0() -> None:
    y, z = random_logits(2, 3, 9), random_logits(2, 3, 9, seed=1)
    order = jnp.asarray(np.random.default_rng(2).permutation(9))
    same = ULD().values(TermInputs(y, DenseScores(z[..., order])))
    np.testing.assert_allclose(
        same, ULD().values(TermInputs(y, DenseScores(z))), rtol=RTOL["float32"]
    )
    with jax.enable_x64(True):
        # In float32 the sum of the softmax itself depends on the order: 1e-7.
        wide = y.astype(jnp.float64)
        own = ULD().values(TermInputs(wide[..., order], DenseScores(wide)))
        assert float(own.max()) <= ATOL["self float64"]


# Text "abcdef": the student cuts ab|c|d|ef, the teacher a|b|cd|e|f.
OURS, THEIRS = np.array([2, 3, 4, 6]), np.array([1, 2, 4, 5, 6])
OUR_IDS, THEIR_IDS = np.array([3, 5, 1, 0]), np.array([7, 2, 4, 6, 1])


def span_inputs() -> tuple[Any, SpanScores, Any]:
    spans = align_spans([OURS], [THEIRS], student_len=4, teacher_len=5)
    y, z = random_logits(1, 4, 9), random_logits(1, 5, 12, seed=1)
    labels = lambda ids: jnp.asarray(np.append(ids[1:], 0))[None]
    scores = SpanScores(z, labels(THEIR_IDS), Spans(*map(jnp.asarray, spans)))
    return y, scores, labels(OUR_IDS)


def test_positions_pair_where_both_cut_at_the_same_byte() -> None:
    spans = align_spans([OURS], [THEIRS], student_len=4, teacher_len=5)
    # The span "ab" holds the first token, which no position predicts.
    np.testing.assert_array_equal(spans.starts[0], [True, False, True, False])
    np.testing.assert_array_equal(spans.student_span[0], [1, 1, 2, -1])
    np.testing.assert_array_equal(spans.teacher_span[0], [0, 1, 2, 2, -1])
    assert (int(spans.teacher_at[0, 0]), int(spans.teacher_at[0, 2])) == (1, 2)


def test_a_span_is_its_first_distribution_times_the_tokens_that_follow() -> None:
    y, teacher, labels = span_inputs()
    got = ULD().values(TermInputs(y, teacher, labels=labels))[0]
    q, p = probs(y)[0], probs(teacher.logits)[0]
    # "cd": student tokens 1 and 2, predicted at 0 and 1; one teacher token, at 1.
    first = ranked_distance(p[1], q[0] * q[1, OUR_IDS[2]])
    # "ef": one student token, predicted at 2; teacher tokens 3 and 4, at 2 and 3.
    second = ranked_distance(p[2] * p[3, THEIR_IDS[4]], q[2])
    np.testing.assert_allclose(got, [first, 0, second, 0], rtol=RTOL["float32"])


def test_the_span_gradient_is_that_of_the_value_and_spares_the_teacher() -> None:
    y, teacher, labels = span_inputs()
    total = lambda y, z: (
        ULD().values(TermInputs(y, replace(teacher, logits=z), labels=labels)).sum()
    )
    slope, none = jax.grad(total, argnums=(0, 1))(y, teacher.logits)
    assert not np.asarray(none).any()
    unit = slope / jnp.linalg.norm(slope)
    moved = [total(y + h * unit, teacher.logits) for h in (1e-2, -1e-2)]
    found = (moved[0] - moved[1]) / 2e-2
    np.testing.assert_allclose(found, jnp.linalg.norm(slope), rtol=SLOPE)


def test_special_tokens_and_unfinished_tails_belong_to_no_span() -> None:
    ours, theirs = np.array([-1, 2, 4, 5]), np.array([2, 4, -1])
    spans = align_spans([ours], [theirs], student_len=6, teacher_len=3)
    np.testing.assert_array_equal(spans.student_span[0], [0, 1, -1, -1, -1, -1])
    # The teacher's first token has no prediction, so "the first two bytes" are lost.
    np.testing.assert_array_equal(spans.starts[0], [False, True, *[False] * 4])


def test_tokens_inside_one_character_end_where_it_does() -> None:
    alphabet = ByteLevel.alphabet()
    made = Tokenizer(BPE({t: i for i, t in enumerate(sorted(alphabet))}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    text = "né!"
    ends = byte_ends(text, made.encode(text))
    np.testing.assert_array_equal(ends, [1, 3, 3, 4])


@pytest.mark.parametrize("ask", ["beside", "labels"])
def test_only_uld_with_labels_compares_across_tokenizers(ask: str) -> None:
    y, teacher, _ = span_inputs()
    if ask == "beside":
        with pytest.raises(
            TypeError, match=r"SpanScores gives only full probabilities .* \(for ULD\)"
        ):
            ForwardKL().values(TermInputs(y, teacher))
    else:
        with pytest.raises(ValueError, match="needs the student's labels, got None"):
            ULD().values(TermInputs(y, teacher))
