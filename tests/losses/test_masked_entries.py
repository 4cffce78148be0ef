"""Garbage at positions without weight, for every term and every form of scores."""

from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.losses.chunking import MaterialisedScores, term_sums
from dew.losses.diagnostics import (
    Agreement,
    EntropyGap,
    MassOnTop,
    TeacherCrossEntropy,
)
from dew.losses.divergences import (
    TVD,
    CrossEntropy,
    ForwardKL,
    ReverseKL,
    Sampled,
    ScaledJSD,
    SkewKL,
    SoftCrossEntropy,
    TopKTail,
)
from dew.losses.policy_gradient import PolicyGradient
from dew.losses.scores import DenseScores
from dew.losses.sparse_scores import draw, top_k
from dew.losses.supervised import Classification, Regression
from dew.losses.uld import ULD
from dew.objectives.base import Mean
from tests.support.masked import GARBAGE, with_garbage
from tests.support.tolerances import assert_trees_close

DRAW = np.random.default_rng(0)
WEIGHTS = jnp.asarray([[1, 0.5, 0, 2, 0], [0, 0, 1, 1, 0]], jnp.float32)
STUDENT, TEACHER = (
    jnp.asarray(DRAW.normal(size=(2, 5, 11)), jnp.float32) for _ in range(2)
)
LABELS = jnp.asarray(DRAW.integers(0, 11, (2, 5)), jnp.int32)
PAIRED = (
    ForwardKL(temperature=2.0),
    ReverseKL(),
    ScaledJSD(),
    SkewKL(),
    TVD(),
    SoftCrossEntropy(),
    Agreement(),
    EntropyGap(),
    CrossEntropy(),
)
TERMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dense": (
        DenseScores(TEACHER),
        (
            *PAIRED,
            MassOnTop(k=3),
            TopKTail(k=3),
            TeacherCrossEntropy(),
            ULD(),
            PolicyGradient(discount=0.9),
        ),
    ),
    "top k": (
        top_k(TEACHER, 4),
        (ForwardKL(), *PAIRED[1:], MassOnTop(k=3), TopKTail(k=3)),
    ),
    "drawn": (draw(jax.random.key(0), TEACHER, 4), (Sampled(), CrossEntropy())),
}


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("kind", TERMS)
def test_a_position_without_weight_may_hold_anything(
    kind: str, chunk: int | None
) -> None:
    scores, terms = TERMS[kind]
    terms = tuple(t for t in terms if chunk is None or not t.whole_sequence)

    @jax.jit
    def graded(student: Any, scores: Any, labels: Any) -> Any:
        def total(student: Any) -> Any:
            sums = term_sums(
                terms,
                MaterialisedScores(DenseScores(student)),
                MaterialisedScores(scores),
                weights=WEIGHTS,
                labels=labels,
                chunk=chunk,
            )
            return sum(sums[1:], sums[0]), sums

        return jax.grad(total, has_aux=True)(student)

    names = [f.name for f in fields(scores) if f.metadata.get("pytree_node", True)]
    arrays = {name: getattr(scores, name) for name in names}
    clean = {**arrays, "student": STUDENT, "labels": LABELS}
    want = graded(STUDENT, scores, LABELS)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(want))
    for garbage in GARBAGE:
        spoilt = with_garbage(clean, WEIGHTS > 0, *garbage)
        theirs = scores.replace(**{name: spoilt[name] for name in names})
        found = graded(spoilt["student"], theirs, spoilt["labels"])
        assert_trees_close(found, want, rtol=0)


@pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_value_without_weight_touches_neither_sum_nor_gradient(
    garbage: float,
) -> None:
    def value(x: Any) -> Any:
        return Mean.of(x, jnp.asarray([1.0, 0.0])).total

    total, slope = jax.value_and_grad(value)(jnp.asarray([3.0, garbage]))
    assert total == 3
    np.testing.assert_array_equal(slope, [1, 0])


@pytest.mark.parametrize("criterion", [Classification(), Regression()])
def test_labels_that_are_no_class_and_no_number_need_a_mask(criterion: Any) -> None:
    """A criterion has no mask: a negative class counts nothing, the rest is data."""
    is_class = isinstance(criterion, Classification)
    labels = jnp.asarray([1, -100]) if is_class else jnp.ones((2, 11))
    losses, weights = criterion(STUDENT[0, :2], labels)
    assert bool(jnp.all(jnp.isfinite(losses)))
    np.testing.assert_array_equal(weights, [1, 0] if is_class else [1, 1])
