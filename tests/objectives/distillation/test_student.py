"""What a distillation leaves of its student: loss, reports, average, predictions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from dew.losses.divergences import CrossEntropy, ForwardKL
from dew.losses.hidden_states import AttentionMap, HiddenMSE
from dew.losses.student_loss import StudentLoss
from dew.objectives.balanced_moe import BalancedLM
from dew.objectives.base import (
    Aux,
    EMASpec,
    Mean,
    Objective,
    Prediction,
    Step,
    scalar_loss,
)
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.objective import Distillation
from dew.objectives.distillation.variables import PROJECTORS, TEACHER
from dew.objectives.masked_lm import MaskedLM
from dew.tree import flatten
from tests.support.models import BALANCED, TEXT, loaded, tiny_decoder
from tests.support.objectives import Run, Toy
from tests.support.tolerances import RTOL, assert_trees_close

STEP = Step(jnp.int32(0), jax.random.key(0))
AVERAGE = EMASpec(optax.constant_schedule(0.5))


@cache
def causal(**options: Any) -> CausalLM:
    return CausalLM(source=loaded(tiny_decoder(), TEXT), seq_len=6, **options)


@cache
def taught_by() -> CausalLM:
    return CausalLM(source=loaded(tiny_decoder(embed=12), TEXT), seq_len=6)


def masked() -> MaskedLM:
    source = loaded(tiny_decoder(), TEXT)
    return MaskedLM(source=source, seq_len=6, vocab=11, mask_id=10, rate=0.5)


def balanced(**options: Any) -> BalancedLM:
    source = loaded(tiny_decoder(mlp=BALANCED), TEXT)
    return BalancedLM(lm=CausalLM(source=source, seq_len=6, **options))


class Smoothed(CausalLM):
    """A user's objective: label smoothing at each position, and a z-loss over all."""

    def predict(
        self,
        params: Any,
        batch: Any,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
    ) -> tuple[Mean, Aux[Any], Prediction]:
        _, aux, said = super().predict(params, batch, step, train=train, layers=layers)
        even = -jnp.mean(jax.nn.log_softmax(said.logits), axis=-1)
        said = replace(said, losses=0.9 * said.losses + 0.1 * even)
        stats = Mean.of(said.losses, said.weights)
        z = jnp.mean(jnp.square(jax.nn.logsumexp(said.logits, axis=-1)))
        aux = replace(aux, metrics={"z": z})
        return Mean(stats.total + 0.01 * z * stats.mass, stats.mass), aux, said


class Marked(nn.Module):
    """Logits over eleven words, with batch norm and without a causal order."""

    @nn.compact
    def __call__(self, inputs: Any, *, train: bool = False, layers: Any = ()) -> Any:
        x = nn.Embed(11, 6)(inputs["words"])
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(11)(x)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tagger(Objective[Mean, Any]):
    """A user's objective with `predict` alone: no tokens, labels, states or source."""

    @property
    def inputs(self) -> Any:
        return {"words": jax.ShapeDtypeStruct((6,), jnp.int32)}

    def init(self, key: Any, variables: Any = None) -> Any:
        return Marked().init(key, {"words": jnp.zeros((1, 6), jnp.int32)})

    def loss(self, params: Any, batch: Any, step: Step) -> Any:
        return self.predict(params, batch, step, train=True)[:2]

    def predict(
        self,
        params: Any,
        batch: Any,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
    ) -> Any:
        logits, new = Marked().apply(
            params, batch, train=train, mutable=["batch_stats"] if train else []
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tags"])
        weights = (batch["words"] > 0).astype(jnp.float32)
        aux = Aux(metrics={"seen": jnp.sum(weights)}, variables=dict(new) or None)
        return Mean.of(losses, weights), aux, Prediction(logits, losses, weights)


def texts() -> dict[str, Any]:
    tokens = np.random.default_rng(0).integers(0, 11, (4, 6), np.int32)
    mask = np.arange(6)[None] < np.asarray([6, 4, 1, 3])[:, None]
    return {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask)}


def tagged() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    words, tags = (jnp.asarray(draw.integers(0, 11, (4, 6), np.int32)) for _ in "ab")
    return {"words": words, "tags": tags}


OWN: dict[str, tuple[Any, Any, Any]] = {
    "causal": (causal, texts, None),
    "masked": (masked, texts, None),
    "balanced": (balanced, texts, causal),
    "smoothed": (
        lambda: Smoothed(source=causal().source, seq_len=6),
        texts,
        taught_by,
    ),
    "predicting alone": (Tagger, tagged, None),
}


@cache
def objective(name: str, *terms: Any, **options: Any) -> Distillation:
    student, _, teacher = OWN[name]
    return Distillation(
        student=student(),
        teacher=(teacher or student)(),
        terms=terms,
        **{"measures": (), **options},
    )


def compiled(subject: Objective[Any, Any], name: str, variables: Any) -> Any:
    batch = OWN[name][1]()

    def value(params: Any) -> Any:
        return scalar_loss(subject, {**variables, "params": params}, batch, STEP)

    return jax.jit(jax.value_and_grad(value, has_aux=True))(variables["params"])


@pytest.mark.parametrize("name", OWN)
def test_the_students_own_loss_is_a_term_of_exactly_its_value(name: str) -> None:
    subject = objective(name, StudentLoss(weight=0.5))
    variables = subject.init(jax.random.key(1))
    own = {k: v for k, v in variables.items() if k != TEACHER}
    (want, reports), slope = compiled(subject.student, name, own)
    (found, aux), gradient = compiled(subject, name, variables)
    np.testing.assert_allclose(found, want / 2, rtol=RTOL["float32"])
    assert_trees_close(
        gradient,
        jax.tree.map(lambda g: g / 2, slope),
        rtol=RTOL["reordered"],
        atol=RTOL["chunked"],
    )
    reported = aux.metrics["student_loss"]
    np.testing.assert_allclose(
        reported.total / reported.mass, want, rtol=RTOL["float32"]
    )
    for field in ("variables", "effects", "qk_stats"):
        assert_trees_close(
            getattr(aux, field), getattr(reports, field), rtol=RTOL["float32"]
        )
    for metric, value in reports.metrics.items():
        np.testing.assert_allclose(aux.metrics[metric], value, rtol=RTOL["float32"])


def test_the_own_loss_is_mixed_over_the_mass_of_the_other_terms() -> None:
    terms = (ForwardKL(weight=0.7), StudentLoss(weight=0.3))
    subject = objective("smoothed", *terms)
    variables = subject.init(jax.random.key(1))
    (found, aux), _ = compiled(subject, "smoothed", variables)
    means = {k: m.total / m.mass for k, m in aux.metrics.items() if k != "z"}
    want = 0.7 * means["forward_kl"] + 0.3 * means["student_loss"]
    np.testing.assert_allclose(found, want, rtol=RTOL["float32"])
    masses = {float(aux.metrics[name].mass) for name in ("forward_kl", "student_loss")}
    assert masses == {10.0}


def test_sequences_of_any_length_count_alike_in_the_own_loss() -> None:
    subject = objective(
        "causal", StudentLoss(), CrossEntropy(weight=0.0), per="sequence"
    )
    variables = subject.init(jax.random.key(1))
    (found, aux), _ = compiled(subject, "causal", variables)
    nats = aux.metrics["cross_entropy"]
    assert nats.mass == 3
    np.testing.assert_allclose(found, nats.total / nats.mass, rtol=RTOL["float32"])


def test_the_weight_of_the_own_loss_follows_its_schedule() -> None:
    ramp = optax.linear_schedule(0.0, 1.0, 10)
    subject = objective("causal", StudentLoss(weight=ramp), measures=())
    variables = subject.init(jax.random.key(1))
    loss = jax.jit(lambda step: scalar_loss(subject, variables, texts(), step)[0])
    none, half, whole = (loss(Step(jnp.int32(n), STEP.key)) for n in (0, 5, 10))
    assert none == 0
    np.testing.assert_allclose(2 * half, whole, rtol=RTOL["float32"])


@pytest.mark.parametrize("name", OWN)
def test_the_students_predictions_are_those_of_the_distillation(name: str) -> None:
    subject = objective(name, StudentLoss(weight=0.5))
    variables = subject.init(jax.random.key(1))
    own = {k: v for k, v in variables.items() if k != TEACHER}
    batch = OWN[name][1]()
    layers = () if name == "predicting alone" else (0,)
    found, want = (
        one.predict(held, batch, STEP, train=False, layers=layers)
        for one, held in ((subject, variables), (subject.student, own))
    )
    assert_trees_close(found, want, rtol=0)


def attention() -> AttentionMap:
    return AttentionMap(pairs=((0, 0),), mean_heads=True)


@pytest.mark.parametrize(
    "term",
    [
        ForwardKL(),
        StudentLoss(),
        HiddenMSE(pairs=((0, 0),)),
        AttentionMap(pairs=((0, 0),), mean_heads=True),
    ],
    ids=lambda term: type(term).__name__,
)
def test_reports_of_the_student_survive_every_term(term: Any) -> None:
    student = balanced(qk_stats=True)
    pair: dict[str, Any] = {"student": student, "teacher": taught_by()}
    subject = Distillation(**pair, terms=(term,), measures=())
    variables = subject.init(jax.random.key(1))
    own = student.init(jax.random.key(1))
    want = jax.jit(lambda v: student.loss(v, texts(), STEP)[1])(own)
    aux = jax.jit(lambda v: subject.loss(v, texts(), STEP)[1])(variables)
    assert_trees_close(aux.qk_stats, want.qk_stats, rtol=RTOL["float32"])
    assert_trees_close(aux.effects, want.effects, rtol=0)


@pytest.mark.parametrize("chunk", [None, 2])
def test_largest_scores_survive_chunks_and_attention_maps(chunk: int | None) -> None:
    student = causal(qk_stats=True)
    terms = (ForwardKL(),) if chunk else (ForwardKL(), attention())
    pair: dict[str, Any] = {"student": student, "teacher": taught_by()}
    subject = Distillation(**pair, terms=terms, chunk=chunk, measures=())
    variables = subject.init(jax.random.key(1))
    reports = jax.jit(lambda one, v: one.loss(v, texts(), STEP)[1], static_argnums=0)
    want = reports(student, student.init(STEP.key)).qk_stats
    assert want is not None
    found = reports(subject, variables).qk_stats
    assert_trees_close(found, want, rtol=RTOL["float32"])


def test_effects_and_statistics_of_the_student_reach_its_collections() -> None:
    subject = objective("balanced", ForwardKL())
    run = Run(subject, example=texts())
    before = run.state.variables
    run.feed(texts())
    after = run.state.variables
    assert set(after["moe"]) == set(before["moe"])
    moved = jax.tree.map(
        lambda a, b: bool(jnp.any(a != b)), after["moe"], before["moe"]
    )
    assert any(jax.tree.leaves(moved))
    assert_trees_close(after[TEACHER], before[TEACHER], rtol=0)
    tagger = Run(objective("predicting alone", ForwardKL()), example=tagged())
    before = tagger.state.variables["batch_stats"]
    tagger.feed(tagged())
    mean = tagger.state.variables["batch_stats"]["BatchNorm_0"]["mean"]
    assert not np.array_equal(mean, before["BatchNorm_0"]["mean"])


SEEN: dict[str, Any] = {}
"""By method, the paths of the average that the student was last given there."""


class Averaging(CausalLM):
    """Notes which collections and parameters of the average reach each method."""

    def predict(self, params: Any, batch: Any, step: Step, **options: Any) -> Any:
        SEEN["predict"] = _names(step)
        return super().predict(params, batch, step, **options)

    def evaluate(self, params: Any, batch: Any, step: Step) -> Any:
        SEEN["evaluate"] = _names(step)
        return super().evaluate(params, batch, step)

    def preview(
        self, params: Any, batch: Any, step: Step, *, scored: Any = None
    ) -> Any:
        SEEN["preview"] = _names(step)
        return "shown"


def _names(step: Step) -> Any:
    return None if step.ema is None else set(flatten(step.ema))


@pytest.mark.parametrize("ema", [AVERAGE, None])
def test_the_average_given_to_the_student_holds_no_teacher(ema: Any) -> None:
    SEEN.clear()
    student = Averaging(source=causal().source, seq_len=6, ema=ema)
    subject = Distillation(
        student=student, teacher=taught_by(), terms=(HiddenMSE(pairs=((0, 0),)),)
    )
    run = Run(subject, example=texts())
    run.feed(texts())
    assert PROJECTORS in run.state.variables["params"]
    paths = set(flatten(student.init(STEP.key)))
    own = None if ema is None else paths
    assert SEEN.pop("predict") == own
    step = replace(STEP, ema=run.state.averaged)
    subject.evaluate(run.state.variables, texts(), step)
    subject.predict(run.state.variables, texts(), step, train=False)
    assert subject.preview(run.state.variables, texts(), step) == "shown"
    assert [SEEN[name] for name in ("evaluate", "predict", "preview")] == [own] * 3
    if ema is not None:
        assert set(flatten(run.state.averaged or {})) > paths


def test_the_artifact_and_held_collections_are_the_students() -> None:
    class Towered(Tagger):
        artifact = dict
        held = ("tower",)

    subject = Distillation(student=Towered(), teacher=Tagger(), terms=(StudentLoss(),))
    assert subject.artifact is dict
    assert {"tower", TEACHER} <= set(subject.held)
    assert objective("causal", ForwardKL()).artifact is CausalLM.artifact


def test_a_class_that_changes_predict_alone_is_neither_split_nor_read() -> None:
    student = Smoothed(source=causal().source, seq_len=6)
    pair: dict[str, Any] = {"student": student, "teacher": taught_by()}
    with pytest.raises(ValueError, match="chunk=2 needs a student and teachers"):
        Distillation(**pair, chunk=2)
    with pytest.raises(ValueError, match="Smoothed defines predict and inherits read"):
        Distillation(**pair, terms=(attention(),))


def test_a_metric_under_the_name_of_a_term_is_refused() -> None:
    class Clashing(Tagger):
        def predict(self, *inputs: Any, **options: Any) -> Any:
            stats, aux, said = super().predict(*inputs, **options)
            return stats, aux.replace(metrics={"student_loss": 1.0}), said

    subject = Distillation(student=Clashing(), teacher=Tagger(), terms=(StudentLoss(),))
    variables = subject.init(STEP.key)
    with pytest.raises(ValueError, match="under the names of terms, student_loss"):
        subject.loss(variables, tagged(), STEP)


def test_a_student_without_predictions_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(TypeError, match="student must score tokens, and Toy lacks"):
        Distillation(student=Toy(), teacher=Tagger())


def test_statistics_of_predict_must_be_one_mean() -> None:
    class Bare(Tagger):
        def predict(self, *inputs: Any, **options: Any) -> Any:
            stats, aux, said = super().predict(*inputs, **options)
            return stats.total, aux, said

    subject = Distillation(student=Bare(), teacher=Tagger(), terms=(StudentLoss(),))
    with pytest.raises(TypeError, match=r"Bare\.predict must return one Mean"):
        subject.loss(subject.init(STEP.key), tagged(), STEP)
