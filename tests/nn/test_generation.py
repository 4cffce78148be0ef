"""Greedy texts of the native road, with a cache, against `transformers.generate`."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import dew
from dew.nn.decoder import read_cached
from dew.tasks.generation import TextGeneration
from tests.converters.families.decoders import TINY
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS

NEW = 12
PROMPTS = [hf.tokens(1, n, seed=n)[0].tolist() for n in (5, 13)]
"""One shorter than the windows of 8, one longer; together they are padded left."""

CASES: Mapping[str, str] = {
    "bloom": "ALiBi",
    "deepseek_v2": "latent attention, turned in float32",
    "deepseek_v3": "latent attention",
    "falcon": "one key for all heads",
    "gemma2": "windows, capped scores and logits",
    "gemma3_text": "windows that turn by a rope of their own",
    "gpt2": "learned positions",
    "gpt_oss": "sinks, windows",
    "mistral": "windows in all layers",
    "opt": "learned positions that skip padding",
    "qwen2_moe": "experts",
    "smollm3": "layers that do not turn",
    "stablelm": "part of a head turns",
}
"""Families, and what a cache could get wrong there."""

SAMPLE = random.Random(3).sample(sorted(CASES), 3)


def padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The prompts and their mask, padded left."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(row)) + list(row) for row in prompts]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
    return np.asarray(ids, np.int32), np.asarray(mask)


def generated(model: Any, prompts: Sequence[Sequence[int]]) -> tuple[Any, np.ndarray]:
    """New tokens [rows, NEW] and the logits [rows, NEW, vocab] they were read off."""
    ids, mask = padded(prompts)
    model.generation_config.eos_token_id = None
    said = model.generate(
        input_ids=torch.tensor(ids, dtype=torch.long),
        attention_mask=torch.tensor(mask),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(said.logits, dim=1).float().numpy()
    return said.sequences[:, ids.shape[1] :].tolist(), logits


def read_step_by_step(
    source: Any, prompts: Sequence[Sequence[int]], new: Sequence[Sequence[int]]
) -> np.ndarray:
    """Logits before each new token, read with a cache."""
    ids, mask = padded(prompts)
    model, variables = source.model, source.variables
    cache = model.empty_cache(len(ids), ids.shape[1] + NEW - 1, jnp.float32)
    steps = [(ids, mask, np.maximum(mask.cumsum(axis=1) - 1, 0))]
    for i in range(NEW - 1):
        column = np.asarray(new)[:, i : i + 1]
        places = mask.sum(axis=1, keepdims=True) + i
        steps.append((column, np.ones_like(column), places))
    logits = []
    for tokens, real, positions in steps:
        inputs = {
            "tokens": jnp.asarray(tokens, jnp.int32),
            "mask": jnp.asarray(real, bool),
            "positions": jnp.asarray(positions, jnp.int32),
        }
        said, cache = read_cached(model, variables, cache, inputs)
        logits.append(np.asarray(said[:, -1]))
    return np.stack(logits, axis=1)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full)
        for name in CASES
    ],
)
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    tiny = TINY[family]
    # A random model that is tied says the last token again and again.
    model = hf.build(tiny.config(**{**tiny.fields, "tie_word_embeddings": False}))
    model.save_pretrained(tmp_path)
    source = dew.load(tmp_path)
    tokens, logits = generated(model, PROMPTS)
    assert min(len({*row}) for row in tokens) > 2
    got = read_step_by_step(source, PROMPTS, tokens)
    assert hf.largest_difference(got, logits) < LOGITS
    task = TextGeneration(replace(source, eos_ids=()), source.variables)
    assert task.continue_tokens(PROMPTS, max_new_tokens=NEW) == tokens
