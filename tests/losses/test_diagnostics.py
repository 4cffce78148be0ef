"""What is watched while distilling, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.losses.diagnostics import (
    Agreement,
    EntropyGap,
    MassOnTop,
    TeacherCrossEntropy,
)
from dew.losses.scores import DenseScores
from dew.losses.sparse_scores import draw, top_k
from dew.losses.term import TermInputs
from tests.losses import reference as ref
from tests.support.tolerances import RTOL

Z, Y = (jnp.asarray(x, jnp.float32) for x in ref.pair())
A, S = ref.log_softmax(np.asarray(Z)), ref.log_softmax(np.asarray(Y))


def test_agreement_is_of_the_likeliest_token_in_every_form() -> None:
    y = Y.at[0, 0].set(Z[0, 0] / 2)
    want = A.argmax(-1) == np.asarray(y).argmax(-1)
    assert want.any()
    for teacher in (DenseScores(Z), top_k(Z, 4)):
        np.testing.assert_array_equal(Agreement().values(TermInputs(y, teacher)), want)


def test_the_mass_on_the_teachers_favourites_is_the_students() -> None:
    top = np.argsort(-A, -1)[..., :3]
    want = np.take_along_axis(np.exp(S), top, -1).sum(-1)
    for teacher in (DenseScores(Z), top_k(Z, 4)):
        got = MassOnTop(k=3).values(TermInputs(Y, teacher))
        np.testing.assert_allclose(got, want, rtol=RTOL["float32"])


def test_the_entropy_gap_is_above_zero_where_the_student_is_less_sure() -> None:
    got = EntropyGap().values(TermInputs(Y, DenseScores(Z)))
    np.testing.assert_allclose(
        got, ref.entropy(S) - ref.entropy(A), atol=RTOL["float32"]
    )
    assert (EntropyGap().values(TermInputs(Z / 4, DenseScores(Z))) > 0).all()


def test_the_teachers_loss_on_the_labels_needs_all_its_scores() -> None:
    labels = jnp.full((2, 3), 4)
    got = TeacherCrossEntropy().values(TermInputs(Y, DenseScores(Z), labels=labels))
    np.testing.assert_allclose(got, -A[..., 4], rtol=RTOL["float32"])
    with pytest.raises(ValueError, match=r"all 50 classes of the student, .* gives 6"):
        TeacherCrossEntropy().values(TermInputs(Y, top_k(Z, 5), labels=labels))


def test_a_sample_does_not_say_which_token_is_likeliest() -> None:
    with pytest.raises(
        TypeError, match=r"Agreement reads log-probabilities .* and SampledScores"
    ):
        Agreement().values(TermInputs(Y, draw(jax.random.key(0), Z, 3)))
