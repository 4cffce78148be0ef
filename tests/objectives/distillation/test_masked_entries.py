"""Garbage behind masks: in tokens, teachers' scores, their states, and spans."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.losses.divergences import CrossEntropy, ForwardKL, Sampled
from dew.losses.hidden_states import AttentionMap, HiddenCosine, HiddenMSE, Relation
from dew.losses.uld import ULD
from dew.objectives.base import Step
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.cross_tokenizer import CrossTokenizerTeacher
from dew.objectives.distillation.encoder_states import EncoderStates
from dew.objectives.distillation.objective import Distillation
from dew.objectives.distillation.on_policy import OnPolicy
from dew.objectives.distillation.teachers import (
    PrecomputedTeacher,
    hidden_name,
    scores_of,
)
from dew.objectives.tokens import next_token_weights
from tests.support.masked import GARBAGE, with_garbage
from tests.support.models import TEXT, loaded, tiny_decoder
from tests.support.tolerances import assert_trees_close

DRAW = np.random.default_rng(0)
REAL = np.arange(6)[None] < np.asarray([6, 4, 1, 3])[:, None]
SPANS = np.where(np.arange(6)[None] < REAL.sum(1)[:, None] - 1, np.arange(6), -1)


def texts() -> dict[str, Any]:
    return {
        "tokens": DRAW.integers(0, 11, (4, 6), np.int32),
        "mask": REAL,
        "positions": np.arange(6, dtype=np.int32)[None] * REAL,
        "segment_ids": REAL.astype(np.int32),
    }


def scored(policy: Any) -> dict[str, Any]:
    """Texts with a teacher's scores and its states after a block."""
    logits = jnp.asarray(DRAW.normal(size=(4, 6, 11)), jnp.float32)
    kept = {"teacher_logits": logits}
    if policy != "logits":
        kept = scores_of(logits, policy=policy, k=4, key=jax.random.key(0))
    states = DRAW.normal(size=(4, 6, 12)).astype(np.float32)
    return {**texts(), **kept, hidden_name(0): states}


def respelled() -> dict[str, Any]:
    """Texts with as many tokens of another tokenizer, each a span of its own."""
    own = texts()
    return {
        **own,
        "respelled_tokens": DRAW.integers(0, 11, (4, 6), np.int32),
        "respelled_positions": own["positions"],
        "respelled_segments": own["segment_ids"],
        "span_starts": SPANS >= 0,
        "span_teacher_at": np.maximum(SPANS, 0).astype(np.int32),
        "span_of_student": SPANS.astype(np.int32),
        "span_of_teacher": SPANS.astype(np.int32),
    }


def causal(embed: int = 8) -> CausalLM:
    return CausalLM(source=loaded(tiny_decoder(embed=embed), TEXT), seq_len=6)


def encoder(embed: int = 8) -> EncoderStates:
    return EncoderStates(source=loaded(tiny_decoder(embed=embed), TEXT), seq_len=6)


def cached(policy: Any) -> PrecomputedTeacher:
    return PrecomputedTeacher(policy=policy, layers=(0,), widths=(12,))


STATES = (HiddenMSE(pairs=((0, 0),)), Relation(pairs=((0, 0),), heads=2))
CASES: dict[str, tuple[Callable[[], Distillation], Callable[[], Any]]] = {
    "cached logits": (
        lambda: Distillation(
            student=causal(),
            teacher=cached("logits"),
            terms=(ForwardKL(), CrossEntropy(), *STATES),
        ),
        lambda: scored("logits"),
    ),
    "cached top k": (
        lambda: Distillation(
            student=causal(),
            teacher=cached("top_k"),
            terms=(ForwardKL(), HiddenCosine(pairs=((0, 0),))),
            per="sequence",
            chunk=4,
        ),
        lambda: scored("top_k"),
    ),
    "cached draws": (
        lambda: Distillation(
            student=causal(), teacher=cached("sampled"), terms=(Sampled(),)
        ),
        lambda: scored("sampled"),
    ),
    "attention": (
        lambda: Distillation(
            student=causal(),
            teacher=causal(12),
            terms=(ForwardKL(), AttentionMap(pairs=((0, 0),))),
        ),
        texts,
    ),
    "encoders": (
        lambda: Distillation(
            student=encoder(), teacher=encoder(12), terms=STATES, measures=()
        ),
        texts,
    ),
    "on policy": (
        lambda: Distillation(
            student=causal(),
            teacher=causal(12),
            on_policy=OnPolicy(rate=0.5, new_tokens=3),
        ),
        texts,
    ),
    "across tokenizers": (
        lambda: Distillation(
            student=causal(),
            teacher=CrossTokenizerTeacher(objective=causal(12)),
            terms=(ULD(), CrossEntropy(weight=0.5)),
        ),
        respelled,
    ),
}


@cache
def case(name: str) -> tuple[Any, Any, Any]:
    """The compiled value and gradient, its parameters, and a clean batch."""
    make, draw = CASES[name]
    objective, batch = make(), {k: jnp.asarray(x) for k, x in draw().items()}
    variables = objective.init(jax.random.key(1))

    def value(params: Any, batch: Any) -> Any:
        step = Step(jnp.int32(3), jax.random.key(5))
        stats, aux = objective.loss({**variables, "params": params}, batch, step)
        return objective.reduce_loss(stats)[0], (stats, aux.metrics)

    measure = jax.jit(jax.value_and_grad(value, has_aux=True))
    return measure, variables["params"], batch


@pytest.mark.parametrize("garbage", GARBAGE[:2])
@pytest.mark.parametrize("name", CASES)
def test_no_entry_behind_a_mask_reaches_value_gradient_or_metrics(
    name: str, garbage: tuple[float, int]
) -> None:
    measure, params, batch = case(name)
    spoilt = with_garbage(batch, batch["mask"], *garbage)
    # A teacher's scores stand behind the loss's own mask, the last token's included.
    scores = {k: x for k, x in batch.items() if k in SCORES}
    counted = next_token_weights(batch) > 0
    spoilt |= with_garbage(scores, counted, *garbage)
    if SEGMENTS in batch:
        # They are the mask of the teacher's own tokens.
        spoilt[SEGMENTS] = batch[SEGMENTS]
    before, after = measure(params, batch), measure(params, spoilt)
    assert_trees_close(after, before, rtol=0)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(after[1]))


SEGMENTS = "respelled_segments"
SCORES = (
    "teacher_logits",
    "teacher_ids",
    "teacher_log_probs",
    "teacher_tail",
    "teacher_weights",
)


def test_the_student_is_clean_without_its_teacher() -> None:
    """The same of `states`, from which logits are made in chunks."""
    student, batch = causal(), {k: jnp.asarray(x) for k, x in texts().items()}
    variables, step = (
        student.init(jax.random.key(1)),
        Step(jnp.int32(0), jax.random.key(0)),
    )
    spoilt = with_garbage(batch, batch["mask"], *GARBAGE[1])
    states = jax.jit(lambda b: student.states(variables, b, step, train=True)[0])
    assert_trees_close(states(spoilt), states(batch), rtol=0)
