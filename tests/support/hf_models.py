"""Tiny random models of transformers, saved as the folders that users have."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

VOCAB = 97

LLAMA: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Norms of weights 0.02 give logits of about 0.1; these give about 7.
    "initializer_range": 0.25,
}


def build(
    config: Any,
    seed: int = 0,
    make: Callable[[Any], Any] = AutoModelForCausalLM.from_config,
) -> PreTrainedModel:
    """A random model whose norms and biases are no ones and zeros."""
    torch.manual_seed(seed)
    model = make(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random tiny Llama."""
    return build(LlamaConfig(**{**LLAMA, **changes}), seed)


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Saves a model with a tokenizer and side files, as a hub folder has them."""
    model.save_pretrained(folder, **options)
    words = {f"w{i}": i for i in range(VOCAB - 1)} | {"<unk>": VOCAB - 1}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}\n')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "special_tokens_map.json").write_text('{"unk_token":"<unk>"}')
    (folder / "notes.txt").write_bytes(b"any \xff bytes\r\n")
    (folder / "generation_config.json").write_text('{ "eos_token_id": [2, 5] }')
    return folder


def reloaded(folder: Path) -> PreTrainedModel:
    """Reads a folder as users do, and insists that nothing was missing or left over."""
    config = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model


def edit_config(folder: Path, **changes: Any) -> Path:
    """Sets fields of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    file.write_text(json.dumps(config, indent=2))
    return folder


def edit_tensors(folder: Path, changes: Mapping[str, torch.Tensor | None]) -> Path:
    """Sets tensors of model.safetensors; None removes one."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | dict(changes)
    kept = {name: t.contiguous() for name, t in tensors.items() if t is not None}
    save_file(kept, file, metadata={"format": "pt"})
    return folder


def tokens(batch: int = 2, seq: int = 40, seed: int = 0) -> np.ndarray:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, seq))


def torch_logits(
    model: PreTrainedModel, ids: np.ndarray, mask: np.ndarray | None = None
) -> np.ndarray:
    """What transformers says, float32."""
    attention = None if mask is None else torch.tensor(mask)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids), attention_mask=attention).logits
    return logits.float().numpy()


def logits_op_by_op(
    source: Any, ids: np.ndarray, mask: np.ndarray | None = None
) -> np.ndarray:
    """Our logits without a compiled forward: operations are those of other models.

    Tiny models of one width share nearly all of them, and compiling one forward takes
    longer than running them.
    """
    inputs = {"tokens": jnp.asarray(ids, jnp.int32)}
    if mask is not None:
        inputs["mask"] = jnp.asarray(mask, bool)
    return np.asarray(source.model.apply(source.variables, inputs).logits)


def shaken(variables: Any, seed: int = 0) -> Any:
    """The variables after some training: each a little other than it was."""
    rng = np.random.default_rng(seed)

    def move(leaf: jax.Array) -> jax.Array:
        noise = rng.normal(0, 0.02, leaf.shape).astype(np.float32)
        return leaf.astype(jnp.float32) + noise

    return jax.tree.map(move, variables)


def largest_difference(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference as a part of the largest reference value."""
    return float(np.abs(got - want).max() / np.abs(want).max())
