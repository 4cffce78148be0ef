"""Lowered modules in training mode: dropout from a key, and what cannot be drawn."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from dew.bridges import LoweringExportError, lower
from tests.bridges.lowering.zoo import ZOO
from tests.support import hf_models as hf
from tests.support.tolerances import DROPOUT_SPREAD, LOGITS, RTOL

RATE = 0.3
ONES = {"input": np.ones((200, 300), np.float32)}
KEY = {"dropout": jax.random.key(0)}


def test_training_mode_without_dropout_is_torchs() -> None:
    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=hf.VOCAB, n_embd=16, n_layer=1, n_head=2, **rates)
    model, ids = GPT2LMHeadModel(config), hf.tokens(2, 8)
    lowered = lower(model, {"tokens": ids}, dynamic=False, check=False)
    got = lowered.apply(lowered.variables, {"tokens": ids}, train=True).logits
    want: Any = model.train()
    gap = hf.largest_difference(np.asarray(got), hf.torch_logits(want, ids))
    assert gap < LOGITS


def test_dropout_keeps_as_many_as_torch_and_scales_them_alike() -> None:
    drop = lower(torch.nn.Dropout(RATE), ONES, check=False)
    got = np.asarray(drop.apply({}, ONES, train=True, rngs=KEY).logits)
    torch.manual_seed(0)
    want = functional.dropout(torch.ones(got.shape), RATE).numpy()
    assert np.unique(got).tolist() == np.unique(want).tolist()
    # Of 60000 draws; five standard deviations. So are rows and columns of theirs.
    deviation = (RATE * (1 - RATE) / got.size) ** 0.5
    assert abs((got == 0).mean() - RATE) < 5 * deviation
    for axis, count in ((0, 200), (1, 300)):
        spread = (got == 0).mean(axis).var()
        assert spread == pytest.approx(RATE * (1 - RATE) / count, rel=DROPOUT_SPREAD)


def test_gradients_flow_through_what_was_kept_alone() -> None:
    drop = lower(torch.nn.Dropout(RATE), ONES, check=False)

    def total(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = drop.apply({}, {"input": x}, train=True, rngs=KEY).logits
        return jnp.sum(out), out

    slope, out = jax.grad(total, has_aux=True)(jnp.asarray(ONES["input"]))
    np.testing.assert_array_equal(slope, out)
    assert (np.asarray(out) == 0).any()


class Attention(torch.nn.Module):
    """Attention whose values are an identity, so that its weights come out."""

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        value = torch.eye(query.shape[-2]).expand(query.shape[0], -1, -1)
        rate = RATE if self.training else 0.0
        return functional.scaled_dot_product_attention(query, query, value, None, rate)


def test_attention_drops_weights_after_the_softmax_as_torch_does() -> None:
    draw = np.random.default_rng(0).standard_normal((8, 16, 4))
    query = {"query": draw.astype(np.float32)}
    attention = lower(Attention(), query, dynamic=False)
    whole = np.asarray(attention.apply({}, query).logits)
    out = np.asarray(attention.apply({}, query, train=True, rngs=KEY).logits)
    kept = out != 0
    np.testing.assert_allclose(
        out[kept], whole[kept] / (1 - RATE), rtol=RTOL["float32"]
    )
    assert abs(1 - kept.mean() - RATE) < 5 * (RATE * (1 - RATE) / kept.size) ** 0.5


def test_masks_that_numpy_draws_are_refused_and_the_way_round_works() -> None:
    entry = ZOO["wav2vec2"]
    model: Any = entry.build()
    model.config.layerdrop = 0.0
    lowered = lower(model, entry.inputs(), dynamic=False, check=False)
    with pytest.raises(LoweringExportError, match=r"apply_spec_augment = False"):
        lowered.apply(lowered.variables, entry.inputs(), train=True, rngs=KEY)
    model.config.apply_spec_augment = False
    lowered = lower(model, entry.inputs(), dynamic=False, check=False)
    out = lowered.apply(lowered.variables, entry.inputs(), train=True, rngs=KEY)
    assert np.isfinite(np.asarray(out.logits)).all()
