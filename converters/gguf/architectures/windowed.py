"""The architectures whose layers differ, by a window or by whether they turn."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dew.converters.config.transforms import FULL, WINDOWED
from dew.converters.gguf.architectures.layernorm import COHERE
from dew.converters.gguf.architectures.rmsnorm import LLAMA, OLMO2
from dew.converters.gguf.rows import (
    ALWAYS,
    ATTENTION,
    BLOCK,
    ENDS,
    NORMS,
    QK_NORMS,
    RMS,
    SILU,
    SIZES,
    Arch,
    Facts,
    Fuse,
    HeadCounts,
    TensorRow,
    with_all,
)


def _types(facts: Facts, config: Mapping[str, Any], every: int) -> list[str]:
    """The kind of each layer: as the file lists them, or full every so often."""
    layers = config["num_hidden_layers"]
    listed = facts.get("attention.sliding_window_pattern", every)
    if type(listed) is int:
        listed = [(n + 1) % listed != 0 for n in range(layers)]
    if len(listed) != layers:
        raise ValueError(
            f"attention.sliding_window_pattern must say for {layers} layers whether "
            f"they have a window, got {len(listed)} entries"
        )
    return [WINDOWED if has_window else FULL for has_window in listed]


def _every_fourth(facts: Facts, config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"layer_types": _types(facts, config, every=4)}


def _olmo3(facts: Facts, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Spells both ropes: that of layers with a window is never stretched."""
    plain = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    full = {**plain, **(config["rope_scaling"] or {})}
    attention = facts.get("rope.scaling.attn_factor")
    if attention is not None:
        full["attention_factor"] = attention
    return {
        **_every_fourth(facts, config),
        "rope_parameters": {"full_attention": full, "sliding_attention": plain},
    }


def _exaone4(facts: Facts, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reads windows; the small models have none, and all their layers turn."""
    window = facts.get("attention.sliding_window", 0) or None
    if window is None:
        full = [FULL] * config["num_hidden_layers"]
        return {"sliding_window": None, "layer_types": full}
    return {"sliding_window": window, **_every_fourth(facts, config)}


def _gpt_oss(facts: Facts, config: Mapping[str, Any]) -> Mapping[str, Any]:
    wide, embed = facts.get("expert_feed_forward_length"), config["intermediate_size"]
    if wide not in (None, embed):
        raise ValueError(
            f"expert_feed_forward_length must be feed_forward_length {embed}, "
            f"got {wide}"
        )
    found: dict[str, Any] = {"layer_types": _types(facts, config, every=2)}
    if config["rope_scaling"]:
        # The class cuts the range of frequencies between dimensions.
        found["rope_scaling"] = {**config["rope_scaling"], "truncate": False}
    return found


def _turned(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Swaps the last two axes of stacked matrices; stacked biases stay."""
    return tensor.swapaxes(1, 2) if tensor.ndim == 3 else tensor


COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    class_name="Cohere2ForCausalLM",
    rows={stem: row for stem, row in COHERE.rows.items() if stem not in QK_NORMS},
    fields={**COHERE.fields, "attention.sliding_window": "sliding_window"},
    head_dim=True,
    finish=_every_fourth,
)
SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    # llama.cpp too knows by the architecture that every fourth layer does not turn.
    constants={**LLAMA.constants, "no_rope_layer_interval": 4},
    head_dim=False,
)
EXAONE4 = Arch(
    model_type="exaone4",
    class_name="Exaone4ForCausalLM",
    rows=OLMO2.rows,
    fields=OLMO2.fields,
    constants=SILU,
    head_dim=True,
    finish=_exaone4,
)
OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    class_name="Olmo3ForCausalLM",
    fields={**OLMO2.fields, "attention.sliding_window": "sliding_window"},
    absent=("rope_theta", "rope_scaling"),
    finish=_olmo3,
)
_EXPERTS = BLOCK + "mlp.experts."
_ALTERNATING = Fuse(axis=-1, alternate=True)
_HALF = TensorRow(
    to=_EXPERTS + "gate_up_proj",
    layout=_turned,
    bias=ALWAYS,
    suffixes=("", "_bias"),
    fuse=_ALTERNATING,
)
GPT_OSS = Arch(
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    rows={
        **ENDS,
        **with_all(ATTENTION, bias="attention_bias"),
        "blk.{n}.attn_sinks": TensorRow(
            to=BLOCK + "self_attn.sinks", suffixes=("", "")
        ),
        "blk.{n}.attn_norm": NORMS["blk.{n}.attn_norm"],
        "blk.{n}.post_attention_norm": NORMS["blk.{n}.ffn_norm"],
        "blk.{n}.ffn_gate_inp": TensorRow(to=BLOCK + "mlp.router", bias=ALWAYS),
        "blk.{n}.ffn_gate_exps": _HALF,
        "blk.{n}.ffn_up_exps": _HALF,
        "blk.{n}.ffn_down_exps": TensorRow(
            to=_EXPERTS + "down_proj",
            layout=_turned,
            bias=ALWAYS,
            suffixes=("", "_bias"),
        ),
    },
    fields={
        **SIZES,
        **RMS,
        "attention.sliding_window": "sliding_window",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    constants={"hidden_act": "silu", "swiglu_limit": 7.0},
    head_dim=True,
    finish=_gpt_oss,
)
