"""GGUF architectures whose layers differ in windows or rotary embedding."""

from dataclasses import replace

import numpy as np

from dew.converters.config.fields import Values
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


def _types(facts: Facts, config: Values, every: int) -> list[str]:
    """Attention type of each layer: as the file lists it, or full in each n-th."""
    layers = config["num_hidden_layers"]
    listed = facts.get("attention.sliding_window_pattern", every)
    if type(listed) is int:
        listed = [(n + 1) % listed != 0 for n in range(layers)]
    if len(listed) != layers:
        raise ValueError(
            f"attention.sliding_window_pattern must have one entry for each of the "
            f"{layers} layers, got {len(listed)}"
        )
    return [WINDOWED if has_window else FULL for has_window in listed]


def _every_fourth(facts: Facts, config: Values) -> Values:
    return {"layer_types": _types(facts, config, every=4)}


def _olmo3(facts: Facts, config: Values) -> Values:
    """Spells both rotary embeddings: windowed layers have no scaling."""
    plain = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    full = {**plain, **(config["rope_scaling"] or {})}
    attention = facts.get("rope.scaling.attn_factor")
    if attention is not None:
        full["attention_factor"] = attention
    return {
        **_every_fourth(facts, config),
        "rope_parameters": {"full_attention": full, "sliding_attention": plain},
    }


def _exaone4(facts: Facts, config: Values) -> Values:
    """Reads windows; small models have none, and RoPE in all their layers."""
    window = facts.get("attention.sliding_window", 0) or None
    if window is None:
        full = [FULL] * config["num_hidden_layers"]
        return {"sliding_window": None, "layer_types": full}
    return {"sliding_window": window, **_every_fourth(facts, config)}


def _gpt_oss(facts: Facts, config: Values) -> Values:
    width, embed = facts.get("expert_feed_forward_length"), config["intermediate_size"]
    if width not in (None, embed):
        raise ValueError(
            f"expert_feed_forward_length must be feed_forward_length {embed}, "
            f"got {width}"
        )
    fields: dict[str, object] = {"layer_types": _types(facts, config, every=2)}
    if config["rope_scaling"]:
        # The class does not round the ends of YaRN's range to whole dimensions.
        fields["rope_scaling"] = {**config["rope_scaling"], "truncate": False}
    return fields


def _transpose_stacked(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
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
    # llama.cpp too derives from the architecture which layers have no RoPE.
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
    omitted=("rope_theta", "rope_scaling"),
    finish=_olmo3,
)
_EXPERTS = BLOCK + "mlp.experts."
_ALTERNATING = Fuse(axis=-1, alternate=True)
_HALF = TensorRow(
    to=_EXPERTS + "gate_up_proj",
    layout=_transpose_stacked,
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
            layout=_transpose_stacked,
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
