"""Self-checks of a distillation on a given pair: each a claim with two numbers.

    for row in check_distillation(student, teacher, batch):
        print(row.name, row.expected, row.found, row.passed)

They use the loss of the objective alone, and catch a KL in the wrong direction, a
factor in the value that is not in the gradient, padding that counts, a mask that is not
shifted, and means of means.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dew.losses.chunking import whole_scores
from dew.losses.divergences import Divergence, ForwardKL
from dew.losses.hidden_states import StateTerm
from dew.losses.reference import reference
from dew.losses.scores import paired_scores
from dew.losses.term import Term
from dew.losses.vocabulary import VocabularyMap
from dew.objectives.base import Mean, Objective, Step
from dew.objectives.distillation.check_inputs import Row as Row
from dew.objectives.distillation.check_inputs import (
    Subject,
    apart_and_packed,
    counted,
    pad,
    uneven,
)
from dew.objectives.distillation.objective import Distillation
from dew.objectives.distillation.teachers import ModelTeacher, Teacher
from dew.objectives.distillation.variables import TEACHER, student_variables
from dew.tree import flatten, unflatten
from dew.typing import Batch, Variables

SAME = 1e-4
"""The relative difference allowed in float32 between sums in different orders."""

SLOPE = 0.02
"""The relative error allowed in a float32 central difference of the loss."""


Check = Callable[[Subject], Row | None]
"""One check: a row of the report, or None where it does not apply."""


def check_distillation(
    student: Objective[Any, Any],
    teacher: Objective[Any, Any] | Teacher,
    batch: Batch,
    *,
    terms: Sequence[Term] = (ForwardKL(),),
    vocabulary: VocabularyMap | None = None,
    variables: Variables | None = None,
) -> list[Row]:
    """Checks loss terms between a student and a teacher on a given batch.

    Checks that need at least two texts are left out where there is one. Dropout must be
    off in the models.

    Args:
        student: a token objective over the student.
        teacher: a token objective over the teacher, or any `Teacher`.
        batch: tokens [batch, seq] with the masks of the student's batches.
        terms: the loss terms to check.
        vocabulary: the map between the vocabularies; without one rows are equal.
        variables: those of the distillation; drawn by its `init` when None.

    Returns:
        One row per check, with the expected and the found value.
    """
    if vocabulary is not None and isinstance(teacher, Objective):
        teacher = ModelTeacher(objective=teacher, vocabulary=vocabulary)
    objective = Distillation(
        student=student,
        teacher=teacher,
        terms=tuple(terms),
        measures=(),
        chunk=None,
    )
    rows = check_objective(objective, batch, variables=variables)
    return [*rows, _alignment(objective)]


def check_objective(
    objective: Distillation,
    batch: Batch,
    *,
    variables: Variables | None = None,
    only: Collection[str] | None = None,
) -> list[Row]:
    """Runs all checks, or `only` those of some names, on a distillation objective."""
    if variables is None:
        variables = objective.init(jax.random.key(0))
    arrays = {name: jnp.asarray(leaf) for name, leaf in batch.items()}
    subject = Subject(objective=objective, variables=variables, batch=arrays)
    checks = CHECKS if only is None else {name: CHECKS[name] for name in only}
    return [row for check in checks.values() if (row := check(subject)) is not None]


def _self_loss(subject: Subject) -> Row | None:
    """Every divergence, between the student and itself."""
    terms = tuple(t for t in subject.objective.terms if isinstance(t, Divergence))
    if not terms:
        return None
    return _taught_by_itself(subject, terms, "a student taught by itself has no loss")


def _own_states(subject: Subject) -> Row | None:
    """Every term over states, between the student and itself, layer by layer."""
    objective = subject.objective
    terms = tuple(
        replace(term, pairs=tuple((ours, ours) for ours, _ in term.pairs), teacher=0)
        for term in objective.terms
        if isinstance(term, StateTerm)
    )
    if not terms:
        return None
    return _taught_by_itself(
        subject, terms, "states of a student matched with its own have no loss"
    )


def _taught_by_itself(subject: Subject, terms: tuple[Term, ...], name: str) -> Row:
    """Computes the loss of the student with itself as its only teacher."""
    objective = replace(
        subject.objective,
        teacher=ModelTeacher(objective=subject.objective.student),
        others=(),
        terms=terms,
    )
    own = student_variables(subject.variables)
    both = {**own, TEACHER: {"0": own}}
    value = replace(subject, objective=objective, variables=both).value(subject.batch)
    return Row(
        name=name,
        expected="0",
        found=f"{value:.2g}",
        passed=abs(value) <= 1e-5,
    )


def _formulas(subject: Subject) -> Row | None:
    """The terms' values against float64 numpy, from the logits of both sides."""
    objective, batch = subject.objective, subject.batch
    if objective.others or any(t.reads != "logits" for t in objective.terms):
        return None
    a, s = _both_logits(subject)
    labels = np.roll(np.asarray(batch["tokens"]), -1, axis=1)
    live = counted(batch) > 0
    want = 0.0
    for term in objective.terms:
        values = reference(term, a[live], s[live], labels[live])
        if values is None:
            return None
        want += float(np.mean(values))
    return _equal("the loss is its formula in float64", want, subject.value(batch))


def _both_logits(subject: Subject) -> tuple[np.ndarray, np.ndarray]:
    """Returns float64 log-probabilities of teacher and student over shared classes."""
    objective, batch = subject.objective, subject.batch
    step = Step(jnp.int32(0), jax.random.key(0))

    def sides(variables: Variables, batch: Batch) -> tuple[jax.Array, jax.Array]:
        own = student_variables(variables)
        student = objective.student.predict(own, batch, step, train=False)[2].logits
        held = objective.teacher_variables(variables, 0)
        scored = objective.teachers[0].score(held, batch, step, layers=(), split=False)
        scores = paired_scores(objective, whole_scores(scored.scores))
        # Over the classes that both sides have; log-probabilities are logits too.
        return scores.paired_log_probs(student, 1.0)

    a, s = jax.jit(sides)(subject.variables, batch)
    return np.asarray(a, np.float64), np.asarray(s, np.float64)


def _mass(subject: Subject) -> Row:
    step = Step(jnp.int32(0), jax.random.key(0))
    compiled = jax.jit(lambda v, b: subject.objective.loss(v, b, step)[0])
    stats = compiled(subject.variables, subject.batch)
    want = float(counted(subject.batch).sum())
    found = float(stats.mass) if isinstance(stats, Mean) else float("nan")
    return Row(
        name="the loss is averaged over the tokens that are predicted",
        expected=f"{want:g}",
        found=f"{found:g}",
        passed=found == want,
    )


def _slope(subject: Subject) -> Row:
    value, slope = subject.with_slope(subject.batch)
    norm = float(optax.tree.norm(slope))
    if norm == 0:
        return Row(
            name="the gradient is that of the value",
            expected="a gradient",
            found="0",
            passed=value == 0,
        )
    params = subject.variables["params"]

    def at(size: float) -> float:
        moved = jax.tree.map(lambda p, g: p + size / norm * g, params, slope)
        return subject.at(moved, subject.batch)

    # Small beside the curvature, large beside rounding: a hundredth of the value. Two
    # step sizes, combined so that the third-order error cancels (Richardson).
    size = min(0.01 * max(abs(value), 0.1) / norm, 0.01)
    wide = (at(2 * size) - at(-2 * size)) / (4 * size)
    near = (at(size) - at(-size)) / (2 * size)
    ratio = norm / ((4 * near - wide) / 3)
    return Row(
        name="the gradient is that of the value",
        expected="1",
        found=f"{ratio:.4f}",
        passed=abs(ratio - 1) <= SLOPE,
    )


def _padding(side: str) -> Check:
    def check(subject: Subject) -> Row:
        padded = pad(subject.batch, side)
        return _equal(
            f"padding on the {side} changes nothing",
            subject.value(subject.batch),
            subject.value(padded),
        )

    return check


def _masked(subject: Subject) -> Row:
    """Changes the tokens under a mask, which must have no influence on the loss."""
    padded = pad(subject.batch, "right")
    length = subject.batch["tokens"].shape[1]
    other = padded["tokens"].at[:, length:].set(1)
    return _equal(
        "what stands under a mask changes nothing",
        subject.value(padded),
        subject.value({**padded, "tokens": other}),
    )


def _chunks(subject: Subject) -> Row | None:
    length = subject.batch["tokens"].shape[1]
    chunk = max(2, length // 3 + 1)
    try:
        cut = replace(subject.objective, chunk=chunk)
    except ValueError:
        return None
    whole = replace(subject.objective, chunk=None)
    found, slope = replace(subject, objective=cut).with_slope(subject.batch)
    want, dense = replace(subject, objective=whole).with_slope(subject.batch)
    return _both_equal("any chunk gives the same", want, dense, found, slope)


def _accumulation(subject: Subject) -> Row | None:
    batch = uneven(subject.batch)
    rows = batch["tokens"].shape[0]
    if rows < 2:
        return None
    parts = [
        {name: leaf[i : i + 1] for name, leaf in batch.items()} for i in range(rows)
    ]
    want, dense = subject.with_slope(batch)
    found, slope = subject.with_slope(*parts)
    return _both_equal(
        "microbatches of unequal size make one batch", want, dense, found, slope
    )


def _packed(subject: Subject) -> Row | None:
    tokens = subject.batch["tokens"]
    others = set(subject.batch) - {"tokens", "mask", "positions", "segment_ids"}
    if tokens.shape[0] < 2 or any("teacher" in name for name in others):
        return None
    separate, together = apart_and_packed(tokens)
    return _equal(
        "packed texts count as they do apart",
        subject.value(separate),
        subject.value(together),
    )


def _no_gradient(subject: Subject) -> Row | None:
    if TEACHER not in subject.variables:
        return None
    step = Step(jnp.int32(0), jax.random.key(0))
    leaves = flatten(subject.variables[TEACHER])
    floats = {p: x for p, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def value(moving: dict[str, Any], variables: Variables, batch: Batch) -> jax.Array:
        # Only floating leaves can have a gradient; packed quantised ones are constants.
        fixed = flatten(variables[TEACHER])
        leaves = fixed | dict(zip(floats, moving.values(), strict=True))
        tree = {**variables, TEACHER: unflatten(leaves)}
        stats = subject.objective.loss(tree, batch, step)[0]
        return subject.objective.reduce_loss(stats)[0]

    moving = {f"{i:05d}": leaf for i, leaf in enumerate(floats.values())}
    slope = jax.jit(jax.grad(value))(moving, subject.variables, subject.batch)
    found = float(optax.tree.norm(slope))
    return Row(
        name="no gradient reaches the teacher",
        expected="0",
        found=f"{found:g}",
        passed=found == 0,
    )


def _alignment(objective: Distillation) -> Row:
    teacher = objective.teachers[0]
    found = "the same rows on both sides"
    if isinstance(teacher, ModelTeacher) and teacher.vocabulary is not None:
        found = "; ".join(teacher.vocabulary.report)
    return Row(
        name="the vocabularies are aligned", expected="proved", found=found, passed=True
    )


def _equal(name: str, want: float, found: float) -> Row:
    near = abs(found - want) <= SAME * max(abs(want), 1e-3)
    return Row(
        name=name, expected=f"{want:.6g}", found=f"{found:.6g}", passed=bool(near)
    )


def _both_equal(name: str, want: float, dense: Any, found: float, slope: Any) -> Row:
    row = _equal(name, want, found)
    gap = optax.tree.norm(optax.tree.sub(slope, dense))
    off = float(gap) / max(float(optax.tree.norm(dense)), 1e-12)
    return replace(
        row,
        found=f"{row.found}, gradient off by {off:.1g}",
        passed=row.passed and off <= 10 * SAME,
    )


CHECKS: Mapping[str, Check] = {
    "self": _self_loss,
    "own states": _own_states,
    "formula": _formulas,
    "mass": _mass,
    "slope": _slope,
    "left padding": _padding("left"),
    "right padding": _padding("right"),
    "masked": _masked,
    "chunks": _chunks,
    "accumulation": _accumulation,
    "packed": _packed,
    "teacher": _no_gradient,
}
"""Every check by the short name that `only` takes."""
