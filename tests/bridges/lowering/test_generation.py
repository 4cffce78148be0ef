"""Texts of models without positions, and of tiny temperatures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from transformers import FalconMambaConfig, MambaConfig, MptConfig

import dew
from dew.tasks.generation import TextGeneration
from tests.support import hf_models as hf

NEW = 6
SIZES: Mapping[str, Any] = {"vocab_size": 97, "num_hidden_layers": 2, "eos_token_id": 2}
CONFIGS: Mapping[str, Any] = {
    "mpt": MptConfig(
        vocab_size=97, d_model=32, n_heads=4, n_layers=2, max_seq_len=64, eos_token_id=2
    ),
    "mamba": MambaConfig(**SIZES, hidden_size=32, state_size=8),
    "falcon_mamba": FalconMambaConfig(**SIZES, hidden_size=32, state_size=8),
}
PADDED = ("mpt",)
"""Those whose torch reads a left-padded row as it reads the row alone."""


@pytest.mark.parametrize(
    "name",
    ["mpt", "mamba", pytest.param("falcon_mamba", marks=pytest.mark.full)],
)
def test_a_model_without_positions_writes_the_text_of_torch(
    name: str, tmp_path: Path
) -> None:
    folder = hf.save(hf.build(CONFIGS[name]), tmp_path / name)
    source = dew.load(folder, road="lowered")
    prompts = [hf.tokens(1, n, seed=n)[0].tolist() for n in (5, 9)]
    task = TextGeneration(source, source.variables)
    model: Any = hf.reloaded(folder)
    model.generation_config.eos_token_id = None
    for rows in (prompts[:1], prompts) if name in PADDED else (prompts[:1],):
        width = max(map(len, rows))
        ids = [[0] * (width - len(row)) + row for row in rows]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        want = model.generate(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )[:, width:]
        got = task.continue_tokens(rows, max_new_tokens=NEW)
        for mine, theirs in zip(got, want.tolist(), strict=True):
            assert mine == theirs[: len(mine)]
            assert len(mine) == NEW or mine[-1] == 2 or theirs[len(mine)] == 2


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45, 1e-60])
def test_a_tiny_temperature_takes_the_most_likely_token(
    temperature: float, tmp_path: Path
) -> None:
    source = dew.load(hf.save(hf.llama(), tmp_path / "llama"))
    task = TextGeneration(source, source.variables)
    rows = [hf.tokens(1, 7)[0].tolist()]
    greedy = task.continue_tokens(rows, max_new_tokens=NEW)
    drawn = task.continue_tokens(
        rows, max_new_tokens=NEW, temperature=temperature, key=jax.random.key(0)
    )
    assert drawn == greedy
