"""A packed row scores each of its documents as it scores alone."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from dew.data import Packing, evaluation_batches
from dew.nn.config import MLP, Attention, DecoderConfig
from dew.nn.decoder import Decoder
from dew.nn.rope import Rope
from tests.support.tolerances import ATOL_PACKED

SEQ_LEN = 32
LETTERS = "abcdefghijklmnopqrstuvwxyz"

Scores: TypeAlias = Callable[[Mapping[str, np.ndarray]], np.ndarray]


@pytest.fixture(scope="module")
def scores() -> Scores:
    """Logits of a small decoder, about 1 in size so that a leak shows."""
    attention = Attention(heads=4, kv_heads=2, head_dim=8, rope=Rope(dim=8))
    decoder: Any = Decoder(
        DecoderConfig(
            vocab=26,
            embed=32,
            layers=2,
            attention=attention,
            mlp=MLP(dim=48),
            init_std=0.1,
        )
    )
    tokens = np.zeros((1, SEQ_LEN), np.int32)
    variables = jax.jit(decoder.init)(jax.random.key(0), {"tokens": tokens})
    return jax.jit(lambda inputs: decoder.apply(variables, inputs).logits)


@pytest.mark.parametrize("packing", ["wrapped", "best_fit"])
def test_each_segment_scores_as_it_does_alone(scores: Scores, packing: Packing):
    draw = np.random.default_rng(0)
    vocab = {letter: place for place, letter in enumerate(LETTERS)}
    sizes = (5, 9, 30, 1, 50, 12, 7, 3)
    (batch,) = evaluation_batches(
        ["".join(draw.choice(list(LETTERS), size)) for size in sizes],
        tokenizer=Tokenizer(models.BPE(vocab=vocab, merges=[])),
        seq_len=SEQ_LEN,
        batch_size=6,
        packing=packing,
    )
    packed = scores(batch)
    for row, numbers in enumerate(batch["segment_ids"]):
        for number in range(1, numbers.max() + 1):
            inside = numbers == number
            alone = np.zeros((1, SEQ_LEN), np.int32)
            alone[0, : inside.sum()] = batch["tokens"][row, inside]
            want = scores({"tokens": alone})[0, : inside.sum()]
            np.testing.assert_allclose(packed[row, inside], want, atol=ATOL_PACKED)
