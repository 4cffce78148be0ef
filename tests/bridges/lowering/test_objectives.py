"""Lowered models under our objectives: the same loss and gradients as in torch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from dew.bridges import Lowered, lower
from dew.bridges.names import flat_weights
from dew.objectives.base import Step
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.objective import Distillation
from dew.source import Source
from tests.support import hf_models as hf
from tests.support.tolerances import RTOL, ZOO_GRADIENT


def step(seed: int = 0) -> Step:
    return Step(step=jnp.zeros((), jnp.int32), key=jax.random.key(seed), ema=None)


def objective(lowered: Lowered) -> CausalLM:
    return CausalLM(
        source=Source(model=lowered, variables=lowered.variables), seq_len=16
    )


@pytest.fixture(scope="module")
def llama() -> Any:
    return hf.llama(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def lowered(llama: Any) -> Lowered:
    return lower(llama, {"tokens": hf.tokens(2, 16)}, check=False)


def test_the_causal_loss_and_its_gradients_are_torchs(
    llama: Any, lowered: Lowered
) -> None:
    ids, causal = jnp.asarray(hf.tokens(2, 16)), objective(lowered)
    variables = causal.init(jax.random.key(0))

    def loss(params: Any) -> jax.Array:
        stats, _ = causal.loss({**variables, "params": params}, {"tokens": ids}, step())
        return stats.total / stats.mass

    value, gradients = jax.jit(jax.value_and_grad(loss))(variables["params"])
    llama.zero_grad()
    tokens = torch.tensor(np.array(ids))
    want = llama(tokens, labels=tokens.long()).loss
    want.backward()
    np.testing.assert_allclose(value, want.item(), rtol=RTOL["float32"])
    ours = flat_weights({"params": gradients})
    scale = max(float(w.grad.abs().max()) for w in llama.parameters())
    for name, weight in llama.named_parameters():
        np.testing.assert_allclose(
            ours[name], weight.grad, atol=RTOL["float32"] * scale
        )


def test_a_packed_row_costs_what_its_documents_cost(lowered: Lowered) -> None:
    causal = objective(lowered)
    ids = jnp.asarray(hf.tokens(1, 16))
    segments = jnp.array([[1] * 7 + [2] * 9])
    packed, _ = causal.loss(
        lowered.variables, {"tokens": ids, "segment_ids": segments}, step()
    )
    parts = [
        causal.loss(lowered.variables, {"tokens": ids[:, cut]}, step())[0]
        for cut in (slice(0, 7), slice(7, 16))
    ]
    np.testing.assert_allclose(
        packed.total, sum(part.total for part in parts), rtol=RTOL["float32"]
    )
    np.testing.assert_allclose(packed.mass, sum(part.mass for part in parts))


def test_dropout_follows_the_steps_key() -> None:
    config = GPT2Config(vocab_size=hf.VOCAB, n_embd=32, n_layer=1, n_head=2)
    torch.manual_seed(0)
    lowered = lower(GPT2LMHeadModel(config), {"tokens": hf.tokens(2, 8)}, dynamic=False)
    causal, batch = objective(lowered), {"tokens": jnp.asarray(hf.tokens(2, 8))}

    def total(seed: int) -> float:
        return float(causal.loss(lowered.variables, batch, step(seed))[0].total)

    assert total(0) == total(0)
    assert total(0) != total(1)
    stats, _, _ = causal.predict(lowered.variables, batch, step(), train=False)
    assert abs(float(stats.total) - total(0)) < 0.2 * float(stats.total)


def test_a_lowered_student_learns_what_torch_says_from_a_lowered_teacher() -> None:
    models: Any = [hf.llama(seed) for seed in (0, 1)]
    ids = hf.tokens(2, 16)
    student, teacher = (lower(m, {"tokens": ids}, check=False) for m in models)
    distilled = Distillation(
        student=objective(student), teacher=objective(teacher), measures=(), chunk=5
    )
    batch = {"tokens": jnp.asarray(ids)}

    def loss(variables: Any) -> jax.Array:
        stats, _ = distilled.loss(variables, batch, step())
        return distilled.reduce_loss(stats)[0]

    variables = distilled.init(jax.random.key(0))
    value, slopes = jax.jit(jax.value_and_grad(loss))(variables)
    # The last token predicts nothing.
    mine, theirs = (
        torch.log_softmax(m(torch.tensor(ids)).logits[:, :-1], dim=-1) for m in models
    )
    kl = functional.kl_div(mine, theirs, log_target=True, reduction="none")
    want = kl.sum(-1).mean()
    want.backward()
    np.testing.assert_allclose(value, want.item(), rtol=RTOL["float32"])
    ours = flat_weights({"params": slopes["params"]})
    scale = max(float(w.grad.abs().max()) for w in models[0].parameters())
    for name, weight in models[0].named_parameters():
        gap = np.abs(np.asarray(ours[name]) - weight.grad.numpy()).max()
        assert gap < ZOO_GRADIENT * scale
    assert not any(jnp.any(slope) for slope in jax.tree.leaves(slopes["teacher"]))
