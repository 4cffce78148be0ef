"""An adapter on the real model: PEFT and the merged export say what we do."""

import json
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import dew
from dew.nn.linear import FACTORS
from dew.objectives.causal_lm import CausalLM
from dew.training.checkpoint import Checkpoints
from dew.training.optimizers import adamw
from dew.training.trainer import Trainer
from dew.tree import flatten, unflatten
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS

pytestmark = [
    pytest.mark.full,
    # PEFT asks transformers by a name that is going away.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]


@pytest.fixture(scope="module")
def adapted(smollm2: Path) -> Any:
    """An adapter that moves logits by almost one."""
    lora = dew.Lora(rank=16, alpha=32.0, rslora=True)
    source = dew.adapt(dew.load(smollm2), lora, key=jax.random.key(0))
    leaves, draw = flatten(source.variables), np.random.default_rng(0)
    for path, leaf in leaves.items():
        if path[-1] == FACTORS[1]:
            leaves[path] = jnp.asarray(draw.normal(0, 2e-3, leaf.shape), leaf.dtype)
    return replace(source, variables=unflatten(leaves))


@pytest.fixture(scope="module")
def ids(adapted: Any) -> np.ndarray:
    text = "\n\n".join(topics[name] for name in ("for", "with"))
    return np.array([adapted.tokenizer.encode(text).ids[:256]], np.int32)


def torch_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model.eval()(torch.from_numpy(ids).long()).logits.numpy()


def test_peft_and_the_merged_export_say_what_we_do(
    adapted: Any, smollm2: Path, ids: np.ndarray, tmp_path: Path
) -> None:
    want = adapted.logits(ids)
    assert np.abs(adapted.base.logits(ids) - want).max() > 0.1
    dew.save(adapted, tmp_path / "adapter")
    dew.save(adapted, tmp_path / "merged", merge=True)
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    # As for families, of the largest logit; seen are 1.01e-4 of 35, 2.9e-6.
    assert hf.largest_difference(torch_logits(theirs, ids), want) <= LOGITS
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert hf.largest_difference(torch_logits(merged, ids), want) <= LOGITS


class Text:
    """The same rows of text, again and again."""

    def __init__(self, ids: np.ndarray) -> None:
        self.batch, self.position = {"tokens": ids.reshape(4, 64)}, 0

    def __iter__(self) -> "Text":
        return self

    def __next__(self) -> dict[str, Any]:
        self.position += 1
        return self.batch

    def get_state(self) -> dict[str, Any]:
        return {"position": self.position}

    def set_state(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_a_checkpoint_takes_the_room_of_the_adapter(
    smollm2: Path, ids: np.ndarray, tmp_path: Path
) -> None:
    source = dew.adapt(dew.load(smollm2), dew.Lora(rank=8), key=jax.random.key(0))
    saved = Checkpoints(tmp_path, every=2)
    trainer = Trainer(
        CausalLM(source=source, seq_len=64, trainable=source.is_trained),
        adamw(1e-3),
        key=jax.random.key(0),
        checkpoints=saved,
    )
    state = trainer.fit(Text(ids), steps=2)
    live = sum(x.nbytes for x in flatten(state.variables["params"]).values())
    step = tmp_path / str(saved.latest())
    files = sum(f.stat().st_size for f in step.rglob("*") if f.is_file())
    # Weights and two moments of 9.8 MB each, out of a model of 538 MB.
    assert live < files < 3.2 * live
    meta = json.loads((step / "meta" / "metadata").read_text())
    assert len(meta["held"]) == len(flatten(source.base.variables))
