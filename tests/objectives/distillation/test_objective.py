"""The distillation objective: what it counts, holds, shares and leaves behind."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dew.losses.diagnostics import perplexities
from dew.losses.divergences import CrossEntropy, ForwardKL, Sampled
from dew.losses.hidden_states import HiddenMSE
from dew.objectives.base import FROZEN, Step, scalar_loss, under
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.encoder_states import EncoderStates
from dew.objectives.distillation.objective import Distillation
from dew.objectives.distillation.teachers import (
    ModelTeacher,
    PrecomputedTeacher,
    scores_of,
)
from dew.objectives.distillation.variables import PROJECTORS, TEACHER
from dew.objectives.masked_lm import MaskedLM
from dew.objectives.tokens import next_token_weights
from dew.source import Source
from dew.training.checkpoint import Checkpoints
from dew.training.held import held_hashes, held_paths, supplied_paths
from dew.training.optimizers import OPTIMIZERS
from dew.training.trainer import Trainer
from dew.tree import flatten
from tests.losses import reference as ref
from tests.support.models import TEXT, loaded, tiny_decoder
from tests.support.tolerances import ATOL, RTOL

START = {"step": jnp.int32(0), "key": jax.random.key(0)}


@cache
def student(**options: Any) -> CausalLM:
    return CausalLM(source=loaded(tiny_decoder(), TEXT), seq_len=6, **options)


@cache
def teacher() -> CausalLM:
    return CausalLM(source=loaded(tiny_decoder(embed=12), TEXT), seq_len=6)


def batch() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    mask = np.arange(6)[None] < np.asarray([6, 4, 1, 3])[:, None]
    tokens = draw.integers(0, 11, (4, 6), np.int32)
    return {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask)}


def logits(objective: CausalLM, inputs: dict[str, Any]) -> np.ndarray:
    variables = objective.init(jax.random.key(0))
    said = objective.predict(variables, inputs, Step(**START), train=False)[2]
    return np.asarray(said.logits, np.float64)


def value(objective: Distillation, inputs: dict[str, Any]) -> tuple[float, Any]:
    variables = objective.init(jax.random.key(0))
    step = Step(**START)
    found, aux = jax.jit(lambda v, b: scalar_loss(objective, v, b, step))(
        variables, inputs
    )
    return float(found), aux


def test_the_loss_is_the_weighted_sum_of_the_terms_over_the_students_mass() -> None:
    terms = (ForwardKL(temperature=2.0, weight=0.7), CrossEntropy(weight=0.2))
    objective = Distillation(
        student=student(), teacher=teacher(), terms=terms, measures=()
    )
    x = batch()
    weights = np.asarray(next_token_weights(x), np.float64)
    z, y = logits(teacher(), x), logits(student(), x)
    labels = np.roll(np.asarray(x["tokens"]), -1, axis=1)
    nats = -np.take_along_axis(ref.log_softmax(y), labels[..., None], -1)[..., 0]
    kl = ref.forward_kl(z, y, 2.0)
    want = (weights * (0.7 * kl + 0.2 * nats)).sum() / weights.sum()
    found, aux = value(objective, x)
    np.testing.assert_allclose(found, want, rtol=RTOL["float32"])
    raw = aux.metrics["forward_kl"]
    np.testing.assert_allclose(
        raw.total / raw.mass, (weights * kl).sum() / weights.sum(), rtol=RTOL["float32"]
    )


def test_chunks_change_neither_value_nor_measures() -> None:
    dense, chunked = (
        value(Distillation(student=student(), teacher=teacher(), chunk=c), batch())
        for c in (None, 4)
    )
    np.testing.assert_allclose(chunked[0], dense[0], rtol=RTOL["float32"])
    for name, mean in dense[1].metrics.items():
        got = chunked[1].metrics[name].total
        np.testing.assert_allclose(got, mean.total, rtol=RTOL["float32"], err_msg=name)


def test_what_is_watched_tells_perplexities_of_both_sides() -> None:
    _, aux = value(Distillation(student=student(), teacher=teacher()), batch())
    means = {k: float(m.total / m.mass) for k, m in aux.metrics.items()}
    found = perplexities(means)
    for side, objective in (("student", student()), ("teacher", teacher())):
        variables = objective.init(jax.random.key(0))
        nats, _ = scalar_loss(objective, variables, batch(), Step(**START))
        np.testing.assert_allclose(
            found[f"{side}_perplexity"], np.exp(nats), rtol=RTOL["float32"]
        )
    assert 0 <= means["watch/agreement"] <= 1
    assert 0 < means["watch/mass_on_top"] <= 1


def test_teachers_count_by_their_weights_and_the_labels_once() -> None:
    def of(weights: tuple[float, ...], **rest: Any) -> float:
        first, *others = (ModelTeacher(objective=teacher(), weight=w) for w in weights)
        return value(
            Distillation(
                student=student(),
                teacher=first,
                others=tuple(others),
                measures=(),
                **rest,
            ),
            batch(),
        )[0]

    terms = (ForwardKL(), CrossEntropy())
    np.testing.assert_allclose(
        of((0.25, 0.75), terms=terms), of((1.0,), terms=terms), rtol=RTOL["float32"]
    )


def test_weights_follow_schedules_of_the_accepted_microbatches() -> None:
    ramp = optax.linear_schedule(0.0, 1.0, 10)
    objective = Distillation(
        student=student(),
        teacher=teacher(),
        terms=(ForwardKL(weight=ramp),),
        measures=(),
    )
    variables = objective.init(jax.random.key(0))
    loss = jax.jit(lambda step: scalar_loss(objective, variables, batch(), step)[0])
    steps = [Step(jnp.int32(n), START["key"]) for n in (0, 5, 10)]
    none, half, full = map(loss, steps)
    assert none == 0
    np.testing.assert_allclose(half, full / 2, rtol=RTOL["float32"])


def test_projectors_train_beside_the_student_and_leave_with_nothing() -> None:
    terms = (HiddenMSE(pairs=((0, 0),)),)
    objective = Distillation(
        student=student(), teacher=teacher(), terms=terms, measures=()
    )
    trainer = Trainer(objective, optax.sgd(0.1), key=jax.random.key(0))
    before = objective.init(trainer.key)["params"][PROJECTORS]["0_0"]
    state = trainer.fit(iter([batch()] * 2), steps=2)
    after = state.variables["params"][PROJECTORS]["0_0"]
    assert after.shape == before.shape == (8, 12)
    assert not jnp.array_equal(after, before)
    task = objective.pipeline(state, ema=False)
    assert set(flatten(task.variables)) == set(flatten(student().init(START["key"])))


def test_a_teacher_keeps_its_weights_and_is_only_hashed() -> None:
    objective = Distillation(student=student(), teacher=teacher(), measures=())
    trainer = Trainer(
        objective,
        OPTIMIZERS["adamw"](optax.constant_schedule(0.1)),
        key=jax.random.key(0),
    )
    state = trainer.fit(iter([batch()] * 2), steps=2)
    held = flatten(state.variables[TEACHER]["0"])
    for path, leaf in flatten(teacher().init(START["key"])).items():
        assert jnp.array_equal(held[path], leaf), path
    moments = jax.tree.leaves(state.optimizer)
    sizes = {leaf.shape for leaf in jax.tree.leaves(state.variables["params"])}
    assert {leaf.shape for leaf in moments if leaf.ndim} <= sizes
    names = {f"variables/{TEACHER}/0/" + "/".join(path) for path in held}
    supplied = supplied_paths(objective.initializer)
    paths = held_paths(objective, supplied, state.variables, None)
    assert names <= set(held_hashes(state.variables, paths))


class Position:
    """The same batch for ever, from a place that can be saved."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> dict[str, Any]:
        self.at += 1
        return batch()

    def __iter__(self) -> "Position":
        return self

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at}

    def set_state(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_a_run_resumes_over_its_own_teacher_and_refuses_another(
    tmp_path: Path,
) -> None:
    def run(taught_by: CausalLM, steps: int) -> Any:
        saved = Checkpoints(tmp_path / "run", every=1)
        objective = Distillation(student=student(), teacher=taught_by, measures=())
        trainer = Trainer(
            objective, optax.sgd(0.1), key=jax.random.key(0), checkpoints=saved
        )
        return trainer.fit(Position(), steps=steps, resume=True)

    run(teacher(), 1)
    assert int(run(teacher(), 2).commits) == 2
    source = teacher().source
    moved = Source(
        model=source.model, variables=jax.tree.map(lambda x: x + 1, source.variables)
    )
    with pytest.raises(ValueError, match="then held"):
        run(CausalLM(source=moved, seq_len=6), 3)


def test_a_teacher_that_is_the_frozen_base_is_kept_once() -> None:
    adapter = under("params", "norm")
    source = student().source
    objective = Distillation(
        student=CausalLM(source=source, seq_len=6, trainable=adapter),
        teacher=CausalLM(source=source, seq_len=6),
        measures=(),
    )
    variables = objective.init(jax.random.key(0))
    assert set(flatten(variables[TEACHER]["0"])) == {("params", "norm", "weight")}
    assert ("embed", "weight") in flatten(variables[FROZEN])
    found, _ = value(objective, batch())
    assert found == 0


def test_scores_in_the_batch_count_as_those_made_in_the_step() -> None:
    x = batch()
    z = logits(teacher(), x)
    stored = scores_of(jnp.asarray(z), policy="top_k", k=11, key=None)
    cached = Distillation(student=student(), teacher=PrecomputedTeacher())
    want, live = value(Distillation(student=student(), teacher=teacher()), x)
    got, aux = value(cached, {**x, **stored})
    np.testing.assert_allclose(got, want, rtol=RTOL["float32"])
    kl = aux.metrics["watch/forward_kl"].total
    np.testing.assert_allclose(
        kl, live.metrics["watch/forward_kl"].total, rtol=RTOL["float32"]
    )


def test_drawn_scores_average_to_the_soft_cross_entropy() -> None:
    x = batch()
    z = jnp.asarray(logits(teacher(), x))
    stored = scores_of(z, policy="sampled", k=4000, key=jax.random.key(3))
    objective = Distillation(
        student=student(),
        teacher=PrecomputedTeacher(policy="sampled"),
        terms=(Sampled(),),
    )
    weights = np.asarray(next_token_weights(x), np.float64)
    a, s = ref.log_softmax(np.asarray(z)), ref.log_softmax(logits(student(), x))
    want = (weights * -(np.exp(a) * s).sum(-1)).sum() / weights.sum()
    # 4,000 draws at each of ten positions: a standard error of about 0.005.
    np.testing.assert_allclose(
        value(objective, {**x, **stored})[0], want, atol=ATOL["drawn"]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Distillation(student=student(), teacher=teacher(), terms=()),
            "needs at least one term",
        ),
        (
            lambda: value(
                Distillation(student=student(), teacher=PrecomputedTeacher()), batch()
            ),
            r"missing are \['teacher_ids', 'teacher_log_probs', 'teacher_tail'\]",
        ),
    ],
)
def test_what_cannot_be_distilled_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_masked_student_is_scored_on_the_tokens_that_were_hidden() -> None:
    options: dict[str, Any] = {"seq_len": 6, "vocab": 11, "mask_id": 10, "rate": 0.5}
    masked = MaskedLM(source=loaded(tiny_decoder(), TEXT), **options)
    subject = Distillation(student=masked, teacher=masked, terms=(CrossEntropy(),))
    loss, aux = value(subject, batch())
    step = Step(**START)
    alone = masked.loss(masked.init(jax.random.key(0)), batch(), step)[0]
    own = alone.total / alone.mass
    np.testing.assert_allclose(loss, own, rtol=RTOL["float32"])
    theirs = aux.metrics["watch/teacher_cross_entropy"]
    assert theirs.mass == alone.mass > 3


def test_terms_over_labels_need_a_student_of_tokens() -> None:
    states = EncoderStates(source=loaded(tiny_decoder(), TEXT), seq_len=6)
    with pytest.raises(ValueError, match="CrossEntropy need a student with `labels`"):
        Distillation(student=states, teacher=states, terms=(CrossEntropy(),))
    watching = Distillation(student=states, teacher=states, terms=(ForwardKL(),))
    assert CrossEntropy() not in watching.diagnostics
