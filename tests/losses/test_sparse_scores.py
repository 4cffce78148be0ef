"""Teachers kept small: top k with its tail, drawn tokens, logarithms of tails."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.losses.divergences import (
    ForwardKL,
    ReverseKL,
    Sampled,
    ScaledJSD,
    SoftCrossEntropy,
    TopKTail,
)
from dew.losses.logspace import log1mexp, log_softmax
from dew.losses.scores import DenseScores
from dew.losses.sparse_scores import draw, tempered, top_k, top_k_without_tail
from dew.losses.term import TermInputs
from dew.losses.uld import ULD
from tests.losses import reference as ref
from tests.support.tolerances import ATOL, RTOL

DRAWS = 20_000


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def both() -> tuple[Any, Any]:
    z, y = ref.pair()
    return jnp.asarray(z), jnp.asarray(y)


@pytest.mark.usefixtures("x64")
def test_the_tail_bucket_rises_with_k_to_the_full_kl() -> None:
    z, y = both()
    ks = (1, 2, 5, 10, 25, 49)
    at_all = jax.jit(
        lambda z, y: [TopKTail(k=k).values(TermInputs(y, DenseScores(z))) for k in ks]
    )
    found = np.asarray(at_all(z, y))
    want = [ref.tail_kl(np.asarray(z), np.asarray(y), k) for k in ks]
    np.testing.assert_allclose(found, want, rtol=RTOL["float64"])
    assert (found[1:] - found[:-1] > -ATOL["self float64"]).all()
    np.testing.assert_allclose(
        found[-1], ref.forward_kl(np.asarray(z), np.asarray(y)), rtol=RTOL["float64"]
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("k", [5, ref.VOCAB - 1])
def test_a_stored_top_k_gives_what_the_live_teacher_gives(k: int) -> None:
    z, y = both()
    stored = top_k(z, k)
    for term in (ForwardKL, ReverseKL, ScaledJSD):
        live = term(top=k).values(TermInputs(y, DenseScores(z)))
        np.testing.assert_allclose(
            term().values(TermInputs(y, stored)), live, rtol=RTOL["float64"]
        )
        if k >= ref.VOCAB - 1:
            full = term().values(TermInputs(y, DenseScores(z)))
            np.testing.assert_allclose(live, full, rtol=RTOL["float64"])


@pytest.mark.usefixtures("x64")
def test_everything_stored_leaves_a_finite_gradient_and_no_tail() -> None:
    z, y = both()
    stored = top_k(z, ref.VOCAB)
    assert (np.asarray(stored.tail) == -np.inf).all()
    online = ForwardKL().values(TermInputs(y, DenseScores(z)))
    np.testing.assert_allclose(
        ForwardKL().values(TermInputs(y, stored)), online, rtol=RTOL["float64"]
    )
    slope = jax.grad(lambda y: ForwardKL().values(TermInputs(y, stored)).sum())(y)
    want = np.exp(ref.log_softmax(np.asarray(y))) - np.exp(
        ref.log_softmax(np.asarray(z))
    )
    np.testing.assert_allclose(slope, want, atol=ATOL["gradient"])


@pytest.mark.usefixtures("x64")
def test_fewer_than_stored_merges_the_others_into_the_tail() -> None:
    z, y = both()
    got = TopKTail(k=4).values(TermInputs(y, top_k(z, 12)))
    np.testing.assert_allclose(
        got, TopKTail(k=4).values(TermInputs(y, DenseScores(z))), rtol=RTOL["float64"]
    )


@pytest.mark.usefixtures("x64")
def test_renormalising_both_sides_over_one_class_says_nothing() -> None:
    z, y = both()
    got = TopKTail(k=1, rest="both").values(TermInputs(y, DenseScores(z)))
    np.testing.assert_allclose(got, 0, atol=ATOL["self float64"])


@pytest.mark.usefixtures("x64")
def test_renormalising_the_teacher_alone_pulls_towards_a_biased_target() -> None:
    z, y = both()
    slope = jax.grad(
        lambda y: (
            TopKTail(k=12, rest="teacher").values(TermInputs(y, DenseScores(z))).sum()
        )
    )(y)
    a, s = ref.log_softmax(np.asarray(z)), ref.log_softmax(np.asarray(y))
    cut = np.sort(a, -1)[..., -12:-11]
    target = np.where(a >= cut, np.exp(a), 0)
    target /= target.sum(-1, keepdims=True)
    np.testing.assert_allclose(slope, np.exp(s) - target, atol=ATOL["gradient"])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("power", [1.0, 0.5])
def test_drawn_gradients_average_to_the_full_one(power: float) -> None:
    z, y = both()
    drawn = draw(jax.random.key(0), z, DRAWS, proposal_power=power)
    slope = jax.grad(lambda y: Sampled().values(TermInputs(y, drawn)).sum())(y)
    full = jax.grad(
        lambda y: SoftCrossEntropy().values(TermInputs(y, DenseScores(z))).sum()
    )(y)
    # Six standard errors of a weighted frequency; weights at power .5 reach about 10.
    np.testing.assert_allclose(slope, full, atol=6 * 2 / math.sqrt(DRAWS))


@pytest.mark.usefixtures("x64")
def test_many_draws_give_the_full_kl_less_the_constant() -> None:
    z, y = both()
    drawn = draw(jax.random.key(0), z, DRAWS)
    np.testing.assert_allclose(drawn.weights.sum(-1), 1, rtol=RTOL["float64"])
    got = Sampled().values(TermInputs(y, drawn)) - ref.entropy(
        ref.log_softmax(np.asarray(z))
    )
    want = ref.forward_kl(np.asarray(z), np.asarray(y))
    # Six standard errors of the mean of log q, whose deviation here is below 3.
    np.testing.assert_allclose(got, want, atol=6 * 3 / math.sqrt(DRAWS))


def test_self_normalised_weights_sum_to_one() -> None:
    z = both()[0]
    drawn = draw(jax.random.key(0), z, 8, proposal_power=0.5, self_normalised=True)
    np.testing.assert_allclose(drawn.weights.sum(-1), 1, rtol=RTOL["float32"])


@pytest.mark.usefixtures("x64")
def test_tempering_a_full_store_is_exact() -> None:
    z, y = both()
    moved = tempered(top_k(z, ref.VOCAB), 3.0, num_classes=ref.VOCAB)
    got = ForwardKL(temperature=3.0).values(TermInputs(y, moved))
    want = ref.forward_kl(np.asarray(z), np.asarray(y), 3.0)
    np.testing.assert_allclose(got, want, rtol=RTOL["float64"])


@pytest.mark.parametrize("tail", [1e-1, 1e-4, 1e-6, 1e-8])
def test_the_mass_left_over_keeps_its_digits_in_float32(tail: float) -> None:
    kept = jnp.asarray(math.log1p(-tail), jnp.float32)
    # The input itself is rounded: compare with what it says in float64.
    want = math.log(-math.expm1(float(kept)))
    np.testing.assert_allclose(log1mexp(kept), want, rtol=RTOL["float32"])
    assert abs(want - math.log(tail)) < ATOL["small float32"]


def test_nothing_left_over_is_minus_infinity_without_a_gradient() -> None:
    for kept in (0.0, 1e-7):
        value, slope = jax.value_and_grad(log1mexp)(jnp.asarray(kept))
        assert (float(value), float(slope)) == (-math.inf, 0.0)


@pytest.mark.usefixtures("x64")
def test_a_store_without_tail_gets_it_from_what_is_missing() -> None:
    z, _ = both()
    full = top_k(z, 5)
    got = top_k_without_tail(full.ids, full.log_probs)
    np.testing.assert_allclose(got.tail, full.tail, rtol=RTOL["float64"])


@pytest.mark.parametrize("beta", [0.5, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("gap", [1.0, 1e-1, 1e-2, 1e-3])
def test_the_float32_jsd_of_close_sides_keeps_its_digits(
    beta: float, gap: float
) -> None:
    rng = np.random.default_rng(0)
    z = (2 * rng.normal(size=(8, 50))).astype(np.float32)
    y = (z + gap * rng.normal(size=z.shape)).astype(np.float32)
    a, s = log_softmax(jnp.asarray(z)), log_softmax(jnp.asarray(y))
    got = ScaledJSD(beta=beta, raw=True).between(a, s)
    p, q = np.exp(np.asarray(a, np.float64)), np.exp(np.asarray(s, np.float64))
    d = np.asarray(a, np.float64) - np.asarray(s, np.float64)
    u, v = np.log1p(beta * np.expm1(d)), np.log1p((1 - beta) * np.expm1(-d))
    want = beta * p * (np.expm1(v) - v) + (1 - beta) * q * (np.expm1(u) - u)
    np.testing.assert_allclose(got, want.sum(-1), rtol=RTOL["close float32"])


@pytest.mark.usefixtures("x64")
def test_masked_classes_of_both_sides_count_for_nothing() -> None:
    z, y = both()
    real = jnp.arange(ref.VOCAB) < 40
    cut = lambda x: jnp.where(real, x, -jnp.inf)
    for term in (ForwardKL(), ReverseKL(), ScaledJSD()):
        total = lambda y, z, t=term: t.values(TermInputs(y, DenseScores(z))).sum()
        graded = jax.jit(jax.value_and_grad(total))
        value, slope = graded(cut(y), cut(z))
        want, short = graded(y[..., :40], z[..., :40])
        np.testing.assert_allclose(value, want, rtol=RTOL["float64"])
        np.testing.assert_allclose(slope[..., :40], short, atol=ATOL["gradient"])
        assert not np.asarray(slope[..., 40:]).any()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda y, s, d: ForwardKL().values(TermInputs(y, d)),
            TypeError,
            r"SampledScores gives only a cross-entropy \(for .* Sampled\)",
        ),
        (
            lambda y, s, d: ULD().values(TermInputs(y, s)),
            TypeError,
            "ULD reads full probabilities of the teacher's own .* and TopKScores",
        ),
        (
            lambda y, s, d: ForwardKL(temperature=2.0).values(TermInputs(y, s)),
            ValueError,
            "taken at temperature 1.0, the term asks for 2.0",
        ),
        (
            lambda y, s, d: ForwardKL(top=0),
            ValueError,
            "ForwardKL.top must be None or at least 1, got 0",
        ),
    ],
)
def test_a_sparse_teacher_says_what_it_cannot_answer(
    make: Callable[..., Any], error: type[Exception], message: str
) -> None:
    z, y = both()
    with pytest.raises(error, match=message):
        make(y, top_k(z, 5), draw(jax.random.key(0), z, 3))
