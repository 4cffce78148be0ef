"""What may teach, what is refused with its remedy, and how many classes a top k has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
import torch

import dew
from dew.bridges import LiveTeacher
from dew.losses.diagnostics import MassOnTop
from dew.losses.divergences import ForwardKL, TopKTail
from dew.losses.scores import DenseScores
from dew.losses.sparse_scores import top_k
from dew.losses.student_loss import StudentLoss
from dew.losses.term import TermInputs
from dew.objectives.base import Step, scalar_loss
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.cross_tokenizer import CrossTokenizerTeacher
from dew.objectives.distillation.objective import Distillation
from dew.objectives.distillation.teachers import (
    ModelTeacher,
    PrecomputedTeacher,
    Teacher,
    scores_of,
)
from dew.objectives.supervised import Classification, Supervised
from tests.losses import reference as ref
from tests.support import hf_models as hf
from tests.support.models import PIXELS, TEXT, Perceptron, loaded, tiny_decoder
from tests.support.tolerances import ATOL, RTOL

STEP = Step(jnp.int32(0), jax.random.key(0))
SOURCE = loaded(tiny_decoder(), TEXT)


def causal() -> CausalLM:
    return CausalLM(source=SOURCE, seq_len=6)


def pixels() -> Supervised:
    return Supervised(
        source=loaded(Perceptron(), PIXELS),
        reads={"pixels": jax.ShapeDtypeStruct((5,), jnp.float32)},
        criterion=Classification(),
    )


@dataclass(frozen=True)
class Oracle:
    """A teacher of a user's own that lacks three members of the protocol."""

    weight: float = 1.0
    scores_type: type = DenseScores
    supports_chunking: bool = False
    scores_any_tokens: bool = True
    measures: tuple[Any, ...] = ()

    def batch_spec(self, rows: int, seq: int) -> Any:
        return {}


class Scorer(torch.nn.Module):
    """A torch module, as a user may have it at hand."""


def a_run(tmp_path: Path) -> Any:
    return dew.load(hf.save(hf.llama(num_hidden_layers=1), tmp_path / "model"))


def live() -> LiveTeacher:
    return LiveTeacher(module=hf.llama(num_hidden_layers=1))


@pytest.fixture
def as_users_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns off the tests' own check of types, which would speak before dew does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


STRANGERS: dict[str, tuple[Any, str]] = {
    "string": (
        lambda _: "models/large",
        r"the address 'models/large': give CausalLM\(source=dew.load\('models/large'\)",
    ),
    "path": (Path, r"the address .* give CausalLM\(source=dew.load"),
    "pretrained": (a_run, r"a loaded model, \w+: give CausalLM\(source=the model"),
    "source": (lambda _: SOURCE, "a loaded model, Source: give CausalLM"),
    "model": (
        lambda _: SOURCE.model,
        r"the model Decoder .* give CausalLM\(source=Source\(model=…, variables=…\)",
    ),
    "torch": (
        lambda _: Scorer(),
        r"torch module Scorer: give .*dew.load\(FOLDER\).*LiveTeacher\(module=…\)",
    ),
    "live": (lambda _: live(), "a LiveTeacher: give its `teacher`"),
    "class": (lambda _: CausalLM, "the class CausalLM: give an instance"),
    "members": (
        lambda _: Oracle(),
        "Oracle lacks held_variables, init, score$",
    ),
    "none": (lambda _: None, "NoneType lacks .*score, scores_any_tokens, scores_type"),
    "objective": (
        lambda _: pixels(),
        "teacher must score tokens, and Supervised lacks predict",
    ),
}


@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize("name", STRANGERS)
def test_what_is_no_teacher_is_refused_with_what_was_missing(
    name: str, tmp_path: Path
) -> None:
    make, message = STRANGERS[name]
    with pytest.raises(TypeError, match=message):
        Distillation(student=causal(), teacher=make(tmp_path))


@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize("name", ["string", "source", "torch"])
def test_no_other_side_takes_what_is_no_objective(name: str, tmp_path: Path) -> None:
    stranger, message = STRANGERS[name][0](tmp_path), STRANGERS[name][1]
    with pytest.raises(TypeError, match=r"ModelTeacher.objective must be .*" + message):
        ModelTeacher(objective=stranger)
    with pytest.raises(TypeError, match=r"CrossTokenizerTeacher.*" + message):
        CrossTokenizerTeacher(objective=stranger)
    with pytest.raises(TypeError, match="student must be an objective.*" + message):
        Distillation(student=stranger, teacher=causal())


@pytest.mark.usefixtures("as_users_run")
def test_all_strangers_of_one_distillation_are_named_together() -> None:
    given: dict[str, Any] = {
        "student": "small",
        "teacher": Oracle(),
        "others": (SOURCE,),
        "terms": ("kl", ForwardKL()),
        "measures": ForwardKL(),
    }
    with pytest.raises(TypeError) as refused:
        Distillation(**given)
    for said in (
        "student must be an objective, got the address 'small'",
        "Oracle lacks held_variables, init, score",
        "others[0] must be an objective or a Teacher, got a loaded model",
        "terms[0] must be a term such as ForwardKL(), got 'kl'",
        "measures must be a tuple of terms",
    ):
        assert said in str(refused.value)


def test_an_objective_is_a_teacher_wherever_one_is_taken() -> None:
    subject = Distillation(
        student=causal(), teacher=PrecomputedTeacher(), others=(causal(),)
    )
    assert all(isinstance(teacher, Teacher) for teacher in subject.teachers)


@pytest.mark.parametrize("temperature", [2.0, optax.linear_schedule(2.0, 1.0, 10)])
def test_terms_at_another_temperature_than_stored_scores_are_refused(
    temperature: Any,
) -> None:
    for term in (ForwardKL(temperature=temperature), TopKTail(k=3, temperature=2.0)):
        with pytest.raises(ValueError, match=r"scored at temperature 1\.0, .* must be"):
            Distillation(student=causal(), teacher=PrecomputedTeacher(), terms=(term,))
    Distillation(
        student=causal(),
        teacher=PrecomputedTeacher(temperature=2.0),
        terms=(ForwardKL(temperature=2.0), StudentLoss()),
    )


# The number of classes of a top k


@pytest.mark.parametrize("k", [ref.VOCAB, 10_000])
def test_a_top_k_of_all_classes_is_the_whole_distribution(k: int) -> None:
    z, y = (jnp.asarray(x, jnp.float32) for x in ref.pair())
    want = ForwardKL().values(TermInputs(y, DenseScores(z)))
    for scores in (DenseScores(z), top_k(z, k)):
        for term in (ForwardKL(top=k), TopKTail(k=k)):
            found = term.values(TermInputs(y, scores))
            np.testing.assert_allclose(found, want, rtol=RTOL["float32"])
        mass = MassOnTop(k=k).values(TermInputs(y, scores))
        np.testing.assert_allclose(mass, 1, rtol=RTOL["float32"])
    kept = scores_of(z, policy="top_k", k=k, key=None)
    assert kept["teacher_ids"].shape[-1] == ref.VOCAB
    assert bool(jnp.all(kept["teacher_tail"] == -jnp.inf))


def test_gradients_of_a_top_k_of_all_classes_are_finite() -> None:
    z, y = (jnp.asarray(x, jnp.float32) for x in ref.pair())

    def value(y: Any, **options: Any) -> Any:
        inputs = TermInputs(y, DenseScores(z))
        return jnp.sum(ForwardKL(**options).values(inputs))

    np.testing.assert_allclose(
        jax.jit(jax.grad(value))(y),
        jax.jit(jax.grad(lambda y: value(y, top=999)))(y),
        atol=ATOL["float32"],
    )


def test_diagnostics_of_a_small_vocabulary_measure_what_there_is() -> None:
    wide = ModelTeacher(objective=causal(), top=50)
    subject = Distillation(student=causal(), teacher=wide)
    batch = {"tokens": jnp.arange(12).reshape(2, 6) % 11}
    loss = jax.jit(lambda variables: scalar_loss(subject, variables, batch, STEP))
    aux = loss(subject.init(STEP.key))[1]
    mass = aux.metrics["watch/mass_on_top"]
    np.testing.assert_allclose(mass.total / mass.mass, 1, rtol=RTOL["float32"])


def test_a_live_teacher_passes_on_all_classes_that_there_are() -> None:
    teacher = LiveTeacher(module=hf.llama(num_hidden_layers=1), top_k=5000)
    scores = teacher.score({"tokens": np.asarray([[1, 2, 3]], np.int32)})
    assert scores["teacher_ids"].shape == (1, 3, hf.VOCAB)
    assert bool(jnp.all(scores["teacher_tail"] == -jnp.inf))


def test_a_top_k_of_no_class_is_refused() -> None:
    for make in (lambda: ForwardKL(top=0), lambda: MassOnTop(k=0)):
        with pytest.raises(ValueError, match=r"must be .*at least 1, got 0"):
            make()
    with pytest.raises(ValueError, match="at least 1 class, got 0"):
        top_k(jnp.zeros((1, 3)), 0)
