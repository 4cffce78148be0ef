"""Every identity and limit that tells a right distillation loss from a wrong one.

Each test asks one of four compiled functions: compiling is what these tests cost.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.losses.chunking import MaterialisedScores, term_sums
from dew.losses.divergences import (
    TVD,
    CrossEntropy,
    ForwardKL,
    ReverseKL,
    ScaledJSD,
    SkewKL,
    SoftCrossEntropy,
    TopKTail,
)
from dew.losses.scores import DenseScores
from dew.losses.term import TermInputs
from dew.losses.uld import ULD
from tests.losses import reference as ref
from tests.support.tolerances import ATOL, RTOL


def heat(step: Any) -> Any:
    return step.astype(jnp.float32)


DIVERGENCES = {
    "forward": ForwardKL(temperature=heat),
    "reverse": ReverseKL(temperature=heat),
    "jsd": ScaledJSD(temperature=heat),
    "jsd .1": ScaledJSD(temperature=heat, beta=0.1),
    "jsd 0": ScaledJSD(temperature=heat, beta=0.0),
    "jsd 1": ScaledJSD(temperature=heat, beta=1.0),
    "raw jsd": ScaledJSD(temperature=heat, beta=0.3, raw=True),
    "skew": SkewKL(temperature=heat),
    "skew reverse": SkewKL(temperature=heat, direction="reverse"),
    "tvd": TVD(temperature=heat),
    "tail": TopKTail(temperature=heat, k=7),
    "tail of reverse": ReverseKL(temperature=heat, top=7),
    "uld": ULD(temperature=heat),
}


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def graded(term: Any, z: Any, y: Any, step: Any = 0) -> Any:
    """The term's values, and the gradient of their sum."""

    def total(y: Any) -> Any:
        values = term.values(TermInputs(y, DenseScores(z), step=step))
        return values.sum(), values

    slope, values = jax.grad(total, has_aux=True)(y)
    return values, slope


@jax.jit
def every(z: Any, y: Any, temperature: float) -> Any:
    return {name: graded(term, z, y, temperature) for name, term in DIVERGENCES.items()}


@jax.jit
def kls(z: Any, y: Any, temperature: float) -> Any:
    terms = ForwardKL, ReverseKL, SoftCrossEntropy
    return [graded(term(temperature=lambda _: temperature), z, y) for term in terms]


@jax.jit
def jsds(z: Any, y: Any, beta: float) -> Any:
    """Raw and scaled."""
    return [graded(ScaledJSD(beta=lambda _: beta, raw=r), z, y) for r in (True, False)]


@jax.jit
def skews(z: Any, y: Any, skew: Any) -> Any:
    ways = "forward", "reverse"
    return {d: graded(SkewKL(skew=lambda _: skew, direction=d), z, y) for d in ways}


def jsd(z: Any, y: Any, beta: float) -> Any:
    return jsds(z, y, beta)[0][0]


def scaled_jsd(z: Any, y: Any, beta: float) -> Any:
    return jsds(z, y, beta)[1][0]


@pytest.mark.parametrize("temperature", [1, 2, 4])
def test_a_model_distilled_from_itself_has_no_loss(temperature: float) -> None:
    z, _ = ref.pair()
    for name, (values, slope) in every(z, z, temperature).items():
        assert float(jnp.abs(values).max()) <= ATOL["self float64"], name
        assert float(jnp.abs(slope).max()) <= ATOL["self float64"], name


@pytest.mark.parametrize("temperature", [1, 2, 4])
def test_a_model_distilled_from_itself_has_no_loss_in_float32(
    temperature: float,
) -> None:
    z = ref.pair()[0].astype(np.float32)
    for name, (values, slope) in every(z, z, temperature).items():
        assert values.dtype == jnp.float32
        assert float(jnp.abs(values).max()) <= ATOL["self float32"], name
        assert float(jnp.abs(slope).max()) <= ATOL["self float32"], name


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1, 3])
def test_the_gradient_is_that_of_the_reported_value(
    name: str, temperature: float
) -> None:
    z, y = ref.pair()
    slope = np.asarray(every(z, y, temperature)[name][1])
    norm = np.linalg.norm(slope)
    found = ref.central_difference(
        lambda y: every(z, y, temperature)[name][0].sum(), y, slope / norm, 1e-5
    )
    np.testing.assert_allclose(found / norm, 1.0, rtol=RTOL["difference"])


def test_a_constant_added_to_all_logits_changes_nothing() -> None:
    z, y = ref.pair()
    shift = np.array([3.0, -7.0, 100.0])[:, None]
    moved, still = every(z + shift, y - 2 * shift, 1), every(z, y, 1)
    for name in DIVERGENCES:
        np.testing.assert_allclose(
            moved[name][0], still[name][0], rtol=RTOL["shifted float64"], err_msg=name
        )


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_both_kls_are_the_textbook_sums(temperature: float) -> None:
    z, y = ref.pair()
    forward, reverse, _ = kls(z, y, temperature)
    for got, want in ((forward, ref.forward_kl), (reverse, ref.reverse_kl)):
        np.testing.assert_allclose(
            got[0], want(z, y, temperature), rtol=RTOL["float64"]
        )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_forward_gradient_is_the_difference_of_probabilities(
    temperature: float,
) -> None:
    z, y = ref.pair()
    p, q = (np.exp(ref.log_softmax(x, temperature)) for x in (z, y))
    got = kls(z, y, temperature)[0][1]
    np.testing.assert_allclose(got, temperature * (q - p), atol=ATOL["gradient"])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_reverse_gradient_is_the_closed_form(temperature: float) -> None:
    z, y = ref.pair()
    a, s = (ref.log_softmax(x, temperature) for x in (z, y))
    want = temperature * np.exp(s) * ((s - a) - ref.kl(s, a)[..., None])
    got = kls(z, y, temperature)[1][1]
    np.testing.assert_allclose(got, want, atol=ATOL["gradient"])


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8])
def test_the_jsd_gradient_is_the_closed_form(beta: float) -> None:
    z, y = ref.pair()
    a, s = ref.log_softmax(z), ref.log_softmax(y)
    m = np.log(beta * np.exp(a) + (1 - beta) * np.exp(s))
    want = (1 - beta) * np.exp(s) * ((s - m) - ref.kl(s, m)[..., None])
    np.testing.assert_allclose(jsds(z, y, beta)[0][1], want, atol=ATOL["gradient"])


@pytest.mark.parametrize("share", [0.1, 0.7])
def test_the_skew_gradient_is_the_closed_form(share: float) -> None:
    z, y = ref.pair()
    p, q = np.exp(ref.log_softmax(z)), np.exp(ref.log_softmax(y))
    w = (1 - share) * q * p / (share * p + (1 - share) * q)
    want = -w + q * w.sum(-1, keepdims=True)
    got = skews(z, y, share)["forward"][1]
    np.testing.assert_allclose(got, want, atol=ATOL["gradient"])


def test_the_cross_entropy_gradient_is_probabilities_less_the_label() -> None:
    _, y = ref.pair()
    labels = np.arange(6).reshape(2, 3) * 8
    total = lambda y: (
        CrossEntropy().values(TermInputs(y, labels=jnp.asarray(labels))).sum()
    )
    want = np.exp(ref.log_softmax(y)) - np.eye(ref.VOCAB)[labels]
    np.testing.assert_allclose(jax.jit(jax.grad(total))(y), want, atol=ATOL["gradient"])


@pytest.mark.parametrize("beta", [0.1, 1e-2, 1e-3, 1e-4, 1e-6])
def test_a_small_beta_of_the_raw_jsd_is_beta_times_forward_kl(beta: float) -> None:
    z, y = ref.pair()
    got = jsd(z, y, beta) / beta
    np.testing.assert_allclose(got, ref.jsd(z, y, beta) / beta, rtol=RTOL["beta"])
    # The gap closes as beta log(1 / beta) at worst, with a factor of the pair.
    gap = ref.forward_kl(z, y) - got
    assert ((gap > 0) & (gap < 20 * beta * (1 - np.log(beta)))).all()


@pytest.mark.parametrize("beta", [0.1, 1e-2, 1e-3, 1e-4, 1e-6])
def test_a_beta_near_one_of_the_raw_jsd_is_the_rest_times_reverse_kl(
    beta: float,
) -> None:
    z, y = ref.pair()
    got = jsd(z, y, 1 - beta) / beta
    np.testing.assert_allclose(got, ref.jsd(y, z, beta) / beta, rtol=RTOL["beta"])
    gap = ref.reverse_kl(z, y) - got
    assert ((gap > 0) & (gap < 20 * beta * (1 - np.log(beta)))).all()


def test_the_scaled_jsd_is_continuous_to_both_kls() -> None:
    z, y = ref.pair()
    for end, want in ((0.0, ref.forward_kl(z, y)), (1.0, ref.reverse_kl(z, y))):
        near = scaled_jsd(z, y, abs(end - 1e-12))
        np.testing.assert_allclose(scaled_jsd(z, y, end), want, rtol=RTOL["float64"])
        np.testing.assert_allclose(near, want, rtol=RTOL["near an end"])
        assert np.isfinite(jsds(z, y, end)[1][1]).all()


def test_the_scaled_jsd_at_one_half_is_four_times_the_raw_one() -> None:
    z, y = ref.pair()
    got = scaled_jsd(z, y, 0.5)
    np.testing.assert_allclose(got, 4 * ref.jsd(z, y, 0.5), rtol=RTOL["float64"])


@pytest.mark.parametrize("beta", [0.5, 0.2, 0.01])
def test_swapping_sides_and_beta_leaves_the_jsd_alone(beta: float) -> None:
    z, y = ref.pair()
    one, other = scaled_jsd(z, y, beta), scaled_jsd(y, z, 1 - beta)
    np.testing.assert_allclose(one, other, rtol=RTOL["float64"])


@pytest.mark.parametrize("beta", [0.5, 0.1, 0.9])
def test_the_jsd_is_the_entropy_of_the_mixture_less_the_mixed_entropies(
    beta: float,
) -> None:
    z, y = ref.pair()
    a, s = ref.log_softmax(z), ref.log_softmax(y)
    m = np.log(beta * np.exp(a) + (1 - beta) * np.exp(s))
    want = ref.entropy(m) - beta * ref.entropy(a) - (1 - beta) * ref.entropy(s)
    np.testing.assert_allclose(jsd(z, y, beta), want, rtol=RTOL["float64"])


def test_disjoint_supports_reach_the_bounds_and_only_the_kl_is_unbounded() -> None:
    half = np.broadcast_to(np.arange(ref.VOCAB) < ref.VOCAB // 2, (2, 3, ref.VOCAB))
    z, y = np.where(half, 0, -np.inf), np.where(half, -np.inf, 0)
    found = every(z, y, 1)
    bounds = {"jsd": 4 * np.log(2), "tvd": 1.0, "skew": -np.log(0.1)}
    for name, bound in bounds.items():
        np.testing.assert_allclose(found[name][0], bound, rtol=RTOL["float64"])
        assert np.isfinite(found[name][1]).all()
    assert (np.asarray(found["forward"][0]) == np.inf).all()


def test_the_kl_of_a_far_pair_is_large_where_bounded_losses_stay_bounded() -> None:
    z, y = np.zeros((2, 2, 3, ref.VOCAB))
    z[..., 0], y[..., 1] = 1e4, 1e4
    found = {name: values for name, (values, _) in every(z, y, 1).items()}
    np.testing.assert_allclose(found["forward"], 1e4, rtol=RTOL["float64"])
    assert (found["jsd"] <= 4 * np.log(2) * (1 + RTOL["float64"])).all()
    assert (found["skew"] <= -np.log(0.1) * (1 + RTOL["float64"])).all()


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("share", [0.5, 0.1, 1e-3, 1e-8])
def test_the_skew_kl_is_the_kl_to_a_mixture_and_bounded(
    share: float, direction: str
) -> None:
    z, y = ref.pair()
    got = skews(z, y, share)[direction][0]
    np.testing.assert_allclose(
        got, ref.skew(z, y, share, direction), rtol=RTOL["float64"]
    )
    assert (got <= -np.log(share)).all()


def test_the_skew_kl_ends_at_the_plain_kls_and_at_nothing() -> None:
    z, y = ref.pair()
    plain, nothing = skews(z, y, 0.0), skews(z, y, 1.0)
    for direction, want in (("forward", ref.forward_kl), ("reverse", ref.reverse_kl)):
        np.testing.assert_allclose(
            plain[direction][0], want(z, y), rtol=RTOL["float64"]
        )
        np.testing.assert_allclose(nothing[direction][0], 0, atol=ATOL["self float64"])


@pytest.mark.parametrize("temperature", [16.0, 64.0, 256.0])
def test_t_squared_kl_tends_to_half_the_variance_of_the_logit_gap(
    temperature: float,
) -> None:
    z, y = ref.pair()
    gap = z - y
    limit = ((gap - gap.mean(-1, keepdims=True)) ** 2).mean(-1) / 2
    # The next term of the expansion is of order 1/T.
    got = kls(z, y, temperature)[0][0]
    assert (np.abs(np.asarray(got) / limit - 1) < 4 / temperature).all()


@pytest.mark.parametrize("temperature", [8.0, 64.0, 512.0])
def test_the_gradient_keeps_its_size_as_the_temperature_rises(
    temperature: float,
) -> None:
    z, y = ref.pair()
    gap = z - y
    limit = -(gap - gap.mean(-1, keepdims=True)) / ref.VOCAB
    got = np.asarray(kls(z, y, temperature)[0][1])
    ratio = np.linalg.norm(got, axis=-1) / np.linalg.norm(limit, axis=-1)
    assert (np.abs(ratio - 1) < 4 / temperature).all()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_mixing_kl_and_labels_is_one_cross_entropy_to_the_mixed_target(
    alpha: float,
) -> None:
    z, y = ref.pair()
    p, a, s = np.exp(ref.log_softmax(z)), ref.log_softmax(z), ref.log_softmax(y)
    labels = np.full((2, 3), 11)
    hard = CrossEntropy().values(TermInputs(jnp.asarray(y), labels=jnp.asarray(labels)))
    got = alpha * kls(z, y, 1.0)[0][0] + (1 - alpha) * hard
    target = alpha * p + (1 - alpha) * np.eye(ref.VOCAB)[labels]
    want = -(target * s).sum(-1) - alpha * ref.entropy(a)
    np.testing.assert_allclose(got, want, rtol=RTOL["float64"])


def test_the_soft_cross_entropy_is_the_kl_and_the_teachers_entropy() -> None:
    z, y = ref.pair()
    forward, _, soft = kls(z, y, 1.0)
    want = ref.entropy(ref.log_softmax(z))
    np.testing.assert_allclose(soft[0] - forward[0], want, rtol=RTOL["shifted float64"])
    np.testing.assert_allclose(soft[1], forward[1], atol=ATOL["gradient"])


def test_no_gradient_reaches_the_teacher() -> None:
    z, y = ref.pair()

    def total(z: Any) -> Any:
        return sum(
            term.values(TermInputs(student, DenseScores(z), step=1)).sum()
            for term in terms
        )

    terms = [*DIVERGENCES.values(), SoftCrossEntropy()]
    student = jnp.asarray(y)
    assert not np.asarray(jax.jit(jax.grad(total))(jnp.asarray(z))).any()


def test_temperature_and_beta_follow_schedules_of_the_step() -> None:
    z, y = ref.pair()
    found = every(z, y, 4)["raw jsd"][0]
    np.testing.assert_allclose(
        found, 16 * ref.jsd(z, y, 0.3, 4.0), rtol=RTOL["float64"]
    )


def test_masked_positions_may_hold_anything() -> None:
    z, y = ref.pair()
    weights = jnp.asarray([[1.0, 0.5, 0.0], [0.0, 2.0, 1.0]])
    dirty = jnp.where(weights[..., None] > 0, y, jnp.nan)

    @jax.jit
    def total(y: Any, z: Any) -> Any:
        sides = (MaterialisedScores(DenseScores(y)), MaterialisedScores(DenseScores(z)))
        return sum(term_sums((ForwardKL(), ReverseKL()), *sides, weights=weights))

    graded = jax.value_and_grad(total)
    clean, _ = graded(jnp.asarray(y), jnp.asarray(z))
    got, slope = graded(dirty, dirty * 0 + z)
    np.testing.assert_allclose(got, clean, rtol=RTOL["float64"])
    assert np.isfinite(slope).all()
    assert not np.asarray(slope)[np.asarray(weights) == 0].any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ForwardKL(temperature=0.0),
            r"ForwardKL.temperature must be > 0, got 0",
        ),
        (lambda: ScaledJSD(beta=1.5), r"ScaledJSD.beta must be in \[0, 1\], got 1.5"),
        (lambda: SkewKL(skew=-0.1), r"SkewKL.skew must be in \[0, 1\], got -0.1"),
        (lambda: TopKTail(k=0), r"TopKTail.k must be at least 1, got 0"),
        (
            lambda: ForwardKL().values(
                TermInputs(jnp.zeros(4), DenseScores(jnp.zeros(5)))
            ),
            r"5 classes .* student 4",
        ),
        (
            lambda: CrossEntropy().values(TermInputs(jnp.zeros(3))),
            r"needs the labels .* got None",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_value_found(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()
