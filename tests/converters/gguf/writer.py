"""Tiny GGUF files in the layout of llama.cpp's converter.

Names come from the gguf package's own map, not from the tables under test.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

Tensors = dict[str, np.ndarray]
VOCAB, EMBED, HEADS, KV_HEADS, MLP, BLOCKS = 96, 32, 4, 2, 48, 2


def as_they_are(tensors: Tensors, config: Any) -> Tensors:
    return tensors


def nothing_more(writer: gguf.GGUFWriter, config: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Case:
    """A transformers config with what the converter does to such a model.

    `change` lays the tensors out; `extra` adds the metadata that is this architecture's
    own. `is_listed` says that the metadata all decoders share is written first.
    """

    arch: str
    config: transformers.PretrainedConfig
    change: Callable[[Tensors, Any], Tensors] = as_they_are
    extra: Callable[[gguf.GGUFWriter, Any], None] = nothing_more
    is_listed: bool = True
    raw: Mapping[str, np.ndarray] = field(default_factory=dict)


def randomized(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """Builds a model whose weights are multiples of 1/1024, so that w + 1 is exact."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-400, 400, parameter.shape) / 1024)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randint(-400, 400, buffer.shape) / 1024)
    return model


def rows_in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Interleaves the two rotary halves of each head."""
    half = weight.shape[0] // heads // 2
    halves = weight.reshape(heads, 2, half, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def llama_rows(tensors: Tensors, config: Any) -> Tensors:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def change(name: str, weight: np.ndarray) -> np.ndarray:
        count = heads.get(name.split(".")[-2])
        return rows_in_pairs(weight, count) if count else weight

    return {name: change(name, weight) for name, weight in tensors.items()}


def norms_plus_one(tensors: Tensors, config: Any) -> Tensors:
    return {
        name: weight + 1 if name.endswith("norm.weight") else weight
        for name, weight in tensors.items()
    }


def stacked(tensors: Tensors, config: Any) -> Tensors:
    """Joins `….0.weight`, `….1.weight`, … of experts or of per-head norms."""
    groups: dict[str, dict[int, np.ndarray]] = {}
    kept = {}
    for name, weight in tensors.items():
        for mark in (".experts.", ".norms."):
            head, found, tail = name.partition(mark)
            if found:
                index, _, rest = tail.partition(".")
                joined = f"{head}{mark}{rest}" if mark == ".experts." else head
                joined = joined if mark == ".experts." else f"{head}.weight"
                groups.setdefault(joined, {})[int(index)] = weight
                break
        else:
            kept[name] = weight
    for name, parts in groups.items():
        kept[name] = np.stack([parts[i] for i in range(len(parts))])
    return kept


def stacked_and_squeezed(tensors: Tensors, config: Any) -> Tensors:
    """Drops axes of one, as earlier versions of the converter did."""
    joined = stacked(tensors, config)
    return {name: weight.squeeze() for name, weight in joined.items()}


def mixtral(tensors: Tensors, config: Any) -> Tensors:
    joined = stacked(llama_rows(tensors, config), config)
    return {
        name.replace("model.", "").replace(
            "block_sparse_moe.experts", "feed_forward.experts"
        )
        if ".experts." in name
        else name: weight
        for name, weight in joined.items()
    }


def transposed(tensors: Tensors, config: Any) -> Tensors:
    ends = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {
        name: weight.T if name.endswith(ends) else weight
        for name, weight in tensors.items()
    }


def bloom_qkv(tensors: Tensors, config: Any) -> Tensors:
    def change(weight: np.ndarray) -> np.ndarray:
        parts = weight.reshape(config.n_head, 3, -1, *weight.shape[1:])
        return np.concatenate(
            [parts[:, i].reshape(-1, *weight.shape[1:]) for i in range(3)]
        )

    return {
        name.removeprefix("transformer."): change(weight)
        if "query_key_value" in name
        else weight
        for name, weight in tensors.items()
    }


def falcon_qkv(tensors: Tensors, config: Any) -> Tensors:
    heads = config.num_attention_heads
    kv = 1 if config.multi_query else config.num_kv_heads
    dim = config.hidden_size // heads

    def change(weight: np.ndarray) -> np.ndarray:
        parts = weight.reshape(kv, heads // kv + 2, dim, config.hidden_size)
        q, k, v = parts[:, :-2], parts[:, [-2]], parts[:, [-1]]
        return np.concatenate([x.reshape(-1, config.hidden_size) for x in (q, k, v)])

    return {
        name: change(weight) if "query_key_value" in name else weight
        for name, weight in tensors.items()
    }


def fused_experts(tensors: Tensors, config: Any) -> Tensors:
    """Granite: splits what is fused, after the rows of q and k are in pairs."""
    found = {}
    for name, weight in llama_rows(tensors, config).items():
        if name.endswith("input_linear.weight"):
            experts = name.split("block_sparse_moe")[0].removeprefix("model.")
            halves = np.split(weight, 2, axis=1)
            found[f"{experts}feed_forward.experts.w1.weight"] = halves[0]
            found[f"{experts}feed_forward.experts.w3.weight"] = halves[1]
        else:
            found[name] = weight
    return found


def gpt_oss_experts(tensors: Tensors, config: Any) -> Tensors:
    """gpt-oss: outputs before inputs, every second row of the fused ones apart."""
    found = {}
    for name, weight in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "sinks":
            found[f"{name}.weight"] = weight
        elif "experts" not in name:
            found[name] = weight
        else:
            kind = "bias" if last.endswith("_bias") else "weight"
            rows = weight if kind == "bias" else weight.swapaxes(1, 2)
            if last.startswith("down"):
                found[f"{stem}.down_proj.{kind}"] = rows
            else:
                found[f"{stem}.gate_proj.{kind}"] = rows[:, ::2]
                found[f"{stem}.up_proj.{kind}"] = rows[:, 1::2]
    return found


def neox_qkv(tensors: Tensors, config: Any) -> Tensors:
    """GPT-NeoX: all q rows, all k rows, all v rows."""

    def change(weight: np.ndarray) -> np.ndarray:
        parts = weight.reshape(config.num_attention_heads, 3, -1, *weight.shape[1:])
        return np.concatenate(
            [parts[:, i].reshape(-1, *weight.shape[1:]) for i in range(3)]
        )

    return {
        name: change(weight) if "query_key_value" in name else weight
        for name, weight in tensors.items()
    }


def latent_whole(tensors: Tensors, config: Any) -> Tensors:
    """DeepSeek, as files before the split have it: all but the choice's bias as is."""
    return {
        name.replace("correction_bias", "correction.bias"): weight
        for name, weight in stacked(tensors, config).items()
    }


def latent_split(tensors: Tensors, config: Any) -> Tensors:
    """DeepSeek: each head's k and v apart, and k turned."""
    found = {}
    for name, weight in latent_whole(tensors, config).items():
        if "kv_b_proj" not in name:
            found[name] = weight
            continue
        heads = weight.reshape(config.num_attention_heads, -1, weight.shape[-1])
        k, v = np.split(heads, [config.qk_nope_head_dim], axis=1)
        found[name.replace("kv_b", "k_b")] = k.swapaxes(1, 2)
        found[name.replace("kv_b", "v_b")] = v
    return found


_SHARED: tuple[tuple[str, str], ...] = (
    ("max_position_embeddings", "add_context_length"),
    ("hidden_size", "add_embedding_length"),
    ("intermediate_size", "add_feed_forward_length"),
    ("num_attention_heads", "add_head_count"),
    ("num_key_value_heads", "add_head_count_kv"),
    ("rms_norm_eps", "add_layer_norm_rms_eps"),
    ("layer_norm_eps", "add_layer_norm_eps"),
    ("norm_epsilon", "add_layer_norm_eps"),
    ("num_local_experts", "add_expert_count"),
    ("num_experts", "add_expert_count"),
    ("num_experts_per_tok", "add_expert_used_count"),
    ("head_dim", "add_key_length"),
    ("head_dim", "add_value_length"),
)


def _write_shared(writer: gguf.GGUFWriter, config: Any) -> None:
    fields = config.to_dict()
    rope = fields.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    for name, method in _SHARED:
        if fields.get(name) is not None:
            getattr(writer, method)(fields[name])
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def write_gguf(
    path: Path,
    arch: str,
    tensors: Mapping[str, np.ndarray],
    metadata: Callable[[gguf.GGUFWriter], None],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    metadata(writer)
    for name, tensor in tensors.items():
        is_plain = tensor.ndim == 1 or tensor.shape[-1] % 32
        stored = gguf.GGMLQuantizationType.F32 if is_plain else kind
        data = gguf.quants.quantize(np.ascontiguousarray(tensor), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def renamed(arch: str, blocks: int, tensors: Tensors) -> Tensors:
    """Gives each tensor the GGUF name that the gguf package maps it to."""
    (kind,) = (k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, blocks)
    found = {n: names.get_name(n, try_suffixes=(".weight", ".bias")) for n in tensors}
    assert all(found.values()), {n for n, name in found.items() if not name}
    return {str(found[name]): tensor for name, tensor in tensors.items()}


def gguf_of(case: Case, folder: Path) -> tuple[transformers.PreTrainedModel, Path]:
    """Saves a random model of the case in `folder/source` and as `folder/tiny.gguf`."""
    model = randomized(case.config)
    model.save_pretrained(folder / "source")
    tensors = load_file(folder / "source" / "model.safetensors")
    blocks = case.config.num_hidden_layers
    laid_out = renamed(case.arch, blocks, case.change(tensors, case.config))

    def metadata(writer: gguf.GGUFWriter) -> None:
        if case.is_listed:
            _write_shared(writer, case.config)
        case.extra(writer, case.config)

    path = write_gguf(
        folder / "tiny.gguf", case.arch, {**laid_out, **case.raw}, metadata
    )
    return model, path


def reloaded(folder: Path) -> tuple[transformers.PreTrainedModel, Any]:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    model, report = loaded
    return model.eval(), report


def logits(model: transformers.PreTrainedModel) -> np.ndarray:
    ids = torch.arange(2 * 24).reshape(2, 24) % VOCAB
    with torch.no_grad():
        return model(ids).logits.numpy()


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
