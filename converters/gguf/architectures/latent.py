"""GGUF architectures with latent attention: DeepSeek V2 and V3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dew.converters.config.fields import Values
from dew.converters.gguf.rope import rope_scaling
from dew.converters.gguf.rows import (
    ALWAYS,
    ATTENTION,
    BLOCK,
    ENDS,
    EXPERTS,
    MLP,
    NEVER,
    NO_BIAS,
    NORMS,
    RMS,
    SIZES,
    Arch,
    Facts,
    Fuse,
    HeadCounts,
    TensorRow,
    with_all,
)


def _is_dense(block: int, config: Values) -> bool:
    return block < config["first_k_dense_replace"]


def _has_experts(block: int, config: Values) -> bool:
    return not _is_dense(block, config)


def _q_low(block: int, config: Values) -> bool:
    return config["q_lora_rank"] is not None


def _q_full(block: int, config: Values) -> bool:
    return config["q_lora_rank"] is None


def _transpose_heads(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Transposes each head's matrix, which llama.cpp applies to the query."""
    return tensor.swapaxes(1, 2)


def _latent_fields(facts: Facts, config: Values) -> Values:
    """Reads the sizes of a head; later files state the latent's in their place."""
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    rotary = config["qk_rope_head_dim"]
    key, value = (facts.get(f"attention.{name}_length") for name in ("key", "value"))
    own_key = facts.get("attention.key_length_mla", key)
    own_value = facts.get("attention.value_length_mla", value)
    is_later = facts.get("attention.key_length_mla") is not None
    faults = []
    if config["num_key_value_heads"] not in (1, heads):
        faults.append(
            f"attention.head_count_kv must be 1 or head_count {heads}, got "
            f"{config['num_key_value_heads']}"
        )
    if own_key is None or own_value is None or own_key <= rotary:
        faults.append(
            "attention.key_length and value_length must be a head's, the key's above "
            f"rope.dimension_count {rotary}, got {own_key} and {own_value}"
        )
    if is_later and (key, value) != (rank + rotary, rank):
        faults.append(
            f"attention.key_length and value_length must be the latent's {rank} with "
            f"and without rope.dimension_count {rotary}, got {key} and {value}"
        )
    if config["n_shared_experts"] < 1:
        faults.append(
            f"expert_shared_count must be at least 1, got {config['n_shared_experts']}"
        )
    if faults:
        raise ValueError(f"{facts.name}: " + "; ".join(faults))
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": facts.get("attention.q_lora_rank"),
        "qk_nope_head_dim": own_key - rotary,
        "v_head_dim": own_value,
        **_rope(facts, rotary),
    }


def _rope(facts: Facts, rotary: int) -> dict[str, Any]:
    """Reads RoPE; a tenth of `mscale_all_dim` is stored, and `mscale` equals it."""
    theta = facts.get("rope.freq_base", 10000.0)
    scaling = rope_scaling(facts, theta, rotary)
    tenth = facts.get("rope.scaling.yarn_log_multiplier")
    if scaling is not None and tenth:
        mscale = round(10 * tenth, 6)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _groups(facts: Facts) -> dict[str, int]:
    """Reads the groups of experts; a file that states none has one group."""
    return {
        "n_group": facts.get("expert_group_count", 1),
        "topk_group": facts.get("expert_group_used_count", 1),
    }


def _deepseek_v2(facts: Facts, config: Values) -> Values:
    if facts.get("expert_weights_norm", False):
        raise ValueError(
            f"{facts.name}.expert_weights_norm must be false under a softmax, whose "
            "weights no class of transformers here normalises, got True"
        )
    groups = _groups(facts)
    return {
        **_latent_fields(facts, config),
        **groups,
        "topk_method": "group_limited_greedy" if groups["n_group"] > 1 else "greedy",
        "norm_topk_prob": False,
    }


def _deepseek_v3(facts: Facts, config: Values) -> Values:
    return {
        **_latent_fields(facts, config),
        **_groups(facts),
        "norm_topk_prob": facts.get("expert_weights_norm", False),
    }


_ATTENTION = BLOCK + "self_attn."
_SHARED = BLOCK + "mlp.shared_experts."
# A head's rows of k come before its rows of v.
_KV = TensorRow(to=_ATTENTION + "kv_b_proj", fuse=Fuse(axis=1, merge=True))
_COMMON: Mapping[str, TensorRow] = {
    **ENDS,
    **NORMS,
    **with_all(MLP, in_block=_is_dense),
    **with_all(EXPERTS, in_block=_has_experts),
    **{
        f"blk.{{n}}.ffn_{kind}_shexp": TensorRow(
            to=f"{_SHARED}{kind}_proj", in_block=_has_experts
        )
        for kind in ("gate", "up", "down")
    },
    "blk.{n}.attn_q": TensorRow(to=_ATTENTION + "q_proj", in_block=_q_full),
    "blk.{n}.attn_q_a": TensorRow(to=_ATTENTION + "q_a_proj", in_block=_q_low),
    "blk.{n}.attn_q_a_norm": TensorRow(
        to=_ATTENTION + "q_a_layernorm", in_block=_q_low
    ),
    "blk.{n}.attn_q_b": TensorRow(to=_ATTENTION + "q_b_proj", in_block=_q_low),
    "blk.{n}.attn_kv_a_mqa": TensorRow(to=_ATTENTION + "kv_a_proj_with_mqa"),
    "blk.{n}.attn_kv_a_norm": TensorRow(to=_ATTENTION + "kv_a_layernorm"),
    "blk.{n}.attn_output": ATTENTION["blk.{n}.attn_output"],
}
_SPLIT = {
    **_COMMON,
    "blk.{n}.attn_k_b": replace(_KV, layout=_transpose_heads),
    "blk.{n}.attn_v_b": _KV,
}
_WHOLE = {**_COMMON, "blk.{n}.attn_kv_b": replace(_KV, fuse=None)}
_CHOICE = {
    "blk.{n}.exp_probs_b": TensorRow(
        to=BLOCK + "mlp.gate.e_score_correction",
        weight=NEVER,
        bias=ALWAYS,
        suffixes=("", "_bias"),
        in_block=_has_experts,
    )
}

DEEPSEEK_V2 = Arch(
    model_type="deepseek_v2",
    class_name="DeepseekV2ForCausalLM",
    rows=_SPLIT,
    fields={
        **SIZES,
        **RMS,
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_shared_count": "n_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_weights_scale": "routed_scaling_factor",
        "attention.kv_lora_rank": "kv_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
    },
    defaults={"expert_weights_scale": 1.0},
    constants=NO_BIAS,
    rope=False,
    finish=_deepseek_v2,
)
DEEPSEEK_V2_WHOLE = replace(DEEPSEEK_V2, rows=_WHOLE)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    rows={**_SPLIT, **_CHOICE},
    finish=_deepseek_v3,
)
DEEPSEEK_V3_WHOLE = replace(DEEPSEEK_V3, rows={**_WHOLE, **_CHOICE})
