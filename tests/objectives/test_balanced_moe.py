"""Experts that balance themselves, and attention maxima on their way to a clip."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dew.nn.decoder import Decoder
from dew.objectives.balanced_moe import BalancedLM
from dew.objectives.base import Step
from dew.objectives.causal_lm import CausalLM
from dew.training.qk_clip import qk_clip
from tests.support.models import (
    BALANCED,
    TEXT,
    loaded,
    tiny_decoder,
)
from tests.support.objectives import Run
from tests.support.tolerances import RTOL


def texts(seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    mask = np.arange(6)[None] < np.asarray([6, 3])[:, None]
    tokens = draw.integers(0, 11, (2, 6)).astype(np.int32)
    return {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask)}


def balanced(speed: float, **options: Any) -> BalancedLM:
    source = loaded(tiny_decoder(mlp=BALANCED), TEXT)
    lm = CausalLM(source=source, seq_len=6, **options)
    return BalancedLM(lm=lm, speed=speed)


def of_router(tree: Any) -> Any:
    return tree["layers"]["0"]["mlp"]["router"]["bias"]


def bias_of(run: Run) -> np.ndarray:
    return np.asarray(of_router(run.state.variables["moe"]))


def test_loads_count_the_experts_of_real_tokens() -> None:
    objective, batch = balanced(0.1), texts(3)
    variables = objective.init(jax.random.key(0))
    step = Step(jnp.int32(0), jax.random.key(0))
    _, aux = jax.jit(objective.loss)(variables, batch, step)
    model = objective.lm.source.model
    read = jax.jit(partial(model.apply, mutable=["routing"]))
    _, sown = read(variables, batch)
    (chosen,) = sown["routing"]["layers"]["0"]["mlp"]["chosen"]
    read = np.asarray(chosen)[np.asarray(batch["mask"])].ravel()
    want = np.bincount(read, minlength=4)
    np.testing.assert_array_equal(of_router(aux.effects), want)
    assert want.sum() == 2 * 9


@pytest.mark.parametrize("accumulation", [1, 2])
def test_router_biases_move_once_a_commit_by_the_pooled_loads(
    accumulation: int,
) -> None:
    objective = balanced(0.25)
    frozen = optax.set_to_zero()
    run = Run(objective, accumulation=accumulation, example=texts(0), optimizer=frozen)
    variables = run.state.variables
    step = Step(jnp.int32(0), jax.random.key(0))
    parts = [texts(1), texts(2)]
    loss = jax.jit(objective.loss)
    loads = [np.asarray(of_router(loss(variables, b, step)[1].effects)) for b in parts]
    run.feed(parts[0])
    first = 0.25 * np.sign(np.mean(loads[0]) - loads[0])
    np.testing.assert_array_equal(bias_of(run), first if accumulation == 1 else 0)
    if accumulation == 2:
        run.feed(parts[1])
        pooled = loads[0] + loads[1]
        want = 0.25 * np.sign(np.mean(pooled) - pooled)
        np.testing.assert_array_equal(bias_of(run), want)


def test_biases_even_out_the_loads() -> None:
    objective = balanced(0.01)
    words = jnp.asarray(np.random.default_rng(0).integers(0, 11, (32, 6)), jnp.int32)
    batch = {"tokens": words}
    run = Run(objective, example=batch, optimizer=optax.set_to_zero())
    step = Step(jnp.int32(0), jax.random.key(0))
    loss = jax.jit(objective.loss)

    def spread() -> float:
        effects = loss(run.state.variables, batch, step)[1].effects
        return float(np.std(of_router(effects)))

    before = spread()
    run.feed(*[batch] * 100)
    assert spread() < before / 3


def test_a_model_without_balanced_routers_is_refused() -> None:
    lm = CausalLM(source=loaded(tiny_decoder(), TEXT), seq_len=6)
    with pytest.raises(ValueError, match=r"MoE\(balanced=True\).*\['params'\]"):
        BalancedLM(lm=lm).init(jax.random.key(0))


def test_attention_maxima_reach_the_clip_of_the_optimizer() -> None:
    lm = CausalLM(source=loaded(tiny_decoder(), TEXT), seq_len=6, qk_stats=True)
    optimizer = optax.chain(optax.set_to_zero(), qk_clip(0.05))
    run = Run(lm, accumulation=2, example=texts(0), optimizer=optimizer)
    assert isinstance(lm.source.model, Decoder)
    step = Step(jnp.int32(0), jax.random.key(0))
    loss = jax.jit(lm.loss)

    def maxima() -> np.ndarray:
        parts = [loss(run.state.variables, texts(i), step)[1].qk_stats for i in (1, 2)]
        assert parts[0] is not None
        rows = [p["layers"]["0"]["attn"]["max_logits"][0] for p in parts]
        return np.concatenate(rows).max(axis=0)

    before = maxima()
    assert (before > 0.05).any()
    run.feed(texts(1), texts(2))
    assert (maxima() <= 0.05 * (1 + RTOL["float32"])).all()
