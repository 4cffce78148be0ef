"""Hidden states, relations and attention inside the objective, from any teacher."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.losses.divergences import ForwardKL
from dew.losses.hidden_states import AttentionMap, HiddenMSE, Relation
from dew.objectives.base import Step, scalar_loss
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.check import check_objective
from dew.objectives.distillation.objective import Distillation
from dew.objectives.distillation.teachers import (
    ModelTeacher,
    PrecomputedTeacher,
    hidden_name,
    scores_of,
)
from dew.objectives.distillation.variables import PROJECTORS
from dew.objectives.tokens import next_token_weights
from tests.support.models import TEXT, loaded, tiny_decoder
from tests.support.tolerances import RTOL

STEP = Step(jnp.int32(0), jax.random.key(0))


@cache
def model(layers: int = 2, embed: int = 8, scan: bool = False) -> CausalLM:
    made = tiny_decoder(layers=layers, embed=embed, scan=scan)
    return CausalLM(source=loaded(made, TEXT), seq_len=6)


def batch() -> dict[str, Any]:
    tokens = np.random.default_rng(0).integers(0, 11, (3, 6), np.int32)
    mask = np.arange(6)[None] < np.asarray([6, 4, 5])[:, None]
    return {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask)}


def value(objective: Distillation, inputs: Any) -> tuple[float, Any]:
    variables = objective.init(STEP.key)
    found, aux = jax.jit(lambda v, b: scalar_loss(objective, v, b, STEP))(
        variables, inputs
    )
    return float(found), aux.metrics


def states(objective: CausalLM, layer: int) -> np.ndarray:
    own = objective.init(STEP.key)
    said = objective.predict(own, batch(), STEP, train=False, layers=(layer,))[2]
    return np.asarray(said.hidden[0], np.float64)


def mean(squares: np.ndarray) -> float:
    weights = np.asarray(next_token_weights(batch()), np.float64)
    return float((weights * squares).sum() / weights.sum())


def test_each_term_is_matched_with_the_teacher_that_it_names() -> None:
    ours, first, second = model(), model(3, 8), model(1, 12)
    objective = Distillation(
        student=ours,
        teacher=first,
        others=(ModelTeacher(objective=second),),
        terms=(
            HiddenMSE(pairs=((0, 2),)),
            HiddenMSE(pairs=((1, 0),), teacher=1),
            HiddenMSE(pairs=((1, 1),)),
        ),
        measures=(),
        chunk=None,
    )
    made = objective.init(STEP.key)["params"][PROJECTORS]
    assert {name: leaf.shape for name, leaf in made.items()} == {"1_0": (8, 12)}
    _, metrics = value(objective, batch())
    wanted = {
        "hidden_1": states(ours, 0) - states(first, 2),
        "teacher_2/hidden_2": states(ours, 1) @ np.asarray(made["1_0"], np.float64)
        - states(second, 0),
        "hidden_3": states(ours, 1) - states(first, 1),
    }
    for name, gap in wanted.items():
        got = metrics[name].total / metrics[name].mass
        np.testing.assert_allclose(
            got, mean((gap**2).mean(-1)), rtol=RTOL["float32"], err_msg=name
        )


def attention(objective: CausalLM, layer: int) -> np.ndarray:
    """Probabilities in float64 numpy, from the queries and keys of the first norm."""
    source: Any = objective.source
    own = jax.tree.map(lambda x: np.asarray(x, np.float64), source.variables["params"])
    x = own["embed"]["weight"][np.asarray(batch()["tokens"])]
    assert layer == 0, "the input of later blocks is not known here"
    block = own["layers"]["0"]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + source.model.config.norm.eps)
    x = x * block["attn_norm"]["weight"]
    q, k = (
        np.einsum("bse,hde->bshd", x, block["attn"][n]["weight"]) for n in ("q", "k")
    )
    angle = np.arange(6)[:, None] * 10000.0 ** -(np.arange(0, 4, 2) / 4)
    cos, sin = (np.tile(f(angle), 2)[None, :, None] for f in (np.cos, np.sin))

    def turn(y: np.ndarray) -> np.ndarray:
        half = np.concatenate([-y[..., 2:], y[..., :2]], -1)
        return y * cos + half * sin

    scores = np.einsum("bshd,btkd->bhst", turn(q), turn(k)) / 2
    seen = np.tril(np.ones((6, 6), bool)) & np.asarray(batch()["mask"])[:, None, None]
    scores = np.where(seen, scores, -1e30)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("scan", [False, True])
def test_attention_maps_are_compared_where_keys_are_seen(scan: bool) -> None:
    ours, theirs = model(2, 8, scan), model(1, 12)
    objective = Distillation(
        student=ours,
        teacher=theirs,
        terms=(AttentionMap(pairs=((0, 0),)),),
        measures=(),
    )
    squares = ((attention(ours, 0) - attention(theirs, 0)) ** 2).mean(1)
    real = np.asarray(batch()["mask"])
    seen = np.tril(np.ones((6, 6), bool)) & real[:, None] & real[:, :, None]
    want = mean((squares * seen).sum(-1) / np.maximum(seen.sum(-1), 1))
    np.testing.assert_allclose(
        value(objective, batch())[0], want, rtol=RTOL["reordered"]
    )


def test_a_teacher_that_scored_before_the_step_brings_its_states() -> None:
    theirs = model(3, 12)
    own = theirs.init(STEP.key)
    said = theirs.predict(own, batch(), STEP, train=False, layers=(0, 2))[2]
    stored = scores_of(said.logits, policy="top_k", k=11, key=None)
    stored |= {hidden_name(i): state for i, state in enumerate(said.hidden)}
    before = PrecomputedTeacher(layers=(0, 2), widths=(12, 12))
    terms = (ForwardKL(), HiddenMSE(pairs=((1, 2), (0, 0))))
    both = [
        value(
            Distillation(student=model(), teacher=teacher, terms=terms, measures=()),
            inputs,
        )[0]
        for teacher, inputs in (
            (theirs, batch()),
            (before, {**batch(), **stored}),
        )
    ]
    np.testing.assert_allclose(both[1], both[0], rtol=RTOL["float32"])
    lacking = Distillation(student=model(), teacher=before, terms=terms, measures=())
    with pytest.raises(ValueError, match=r"missing are .*'teacher_hidden_0'"):
        value(lacking, batch())


@pytest.mark.full
def test_the_check_covers_terms_over_states() -> None:
    objective = Distillation(
        student=model(),
        teacher=model(3, 12),
        terms=(
            HiddenMSE(pairs=((0, 1), (1, 2))),
            Relation(pairs=((1, 2),), heads=4),
            AttentionMap(pairs=((0, 0),)),
        ),
        measures=(),
        chunk=None,
    )
    wanted = ("own states", "slope", "right padding", "accumulation")
    rows = check_objective(objective, batch(), only=wanted)
    assert len(rows) == 4
    assert [row for row in rows if not row.passed] == []


def test_a_term_with_a_teacher_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="HiddenMSE matches teacher 1, and there are"):
        Distillation(
            student=model(),
            teacher=model(),
            terms=(HiddenMSE(pairs=((0, 0),), teacher=1),),
        )
