"""Folders whose config.json stands as users have it, with tensors from transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from tests.support import hf_models as hf


def write_raw(raw: Mapping[str, Any], folder: Path) -> PreTrainedModel:
    """Writes a folder of this very config.json; returns what transformers reads there.

    The tensors are those that transformers saves for the class that the config names,
    random and seeded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(raw))
    kind = getattr(transformers, raw["architectures"][0])
    config = AutoConfig.from_pretrained(folder)
    # Weights of 0.02 would attend to all tokens alike, whatever their positions.
    for name in ("initializer_range", "init_std"):
        if hasattr(config, name):
            setattr(config, name, 0.15)
    hf.build(config, make=kind._from_config).float().save_pretrained(folder)
    file.write_text(json.dumps(raw))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def torch_outputs(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    """Logits of a model, or hidden states where it has no head, float32."""
    with torch.no_grad():
        out = model(input_ids=torch.tensor(ids))
    found = getattr(out, "logits", None)
    return (out.last_hidden_state if found is None else found).float().numpy()


def outputs(source: Any, ids: np.ndarray) -> np.ndarray:
    """Our logits, or our hidden states where the model has no head, float32."""
    got = source.model.apply(source.variables, {"tokens": jnp.asarray(ids, jnp.int32)})
    return np.asarray(got.final if got.logits is None else got.logits, np.float32)
