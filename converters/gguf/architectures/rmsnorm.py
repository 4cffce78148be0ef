"""GGUF architectures with RMSNorm: Llama, Qwen, Gemma, Phi 3, Granite and others."""

import math
from collections.abc import Callable
from dataclasses import replace

from dew.converters.config.fields import Values
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
    PLAIN,
    QK_NORMS,
    RMS,
    SANDWICH,
    SILU,
    SIZES,
    Arch,
    Facts,
    Fuse,
    TensorRow,
    one_row,
    with_all,
    with_interleaved_rope,
    with_norms_less_one,
)


def _gemma_scale(layers_of_27b: int) -> Callable[..., Values]:
    """Returns the `finish` for attention scores divided by sqrt(head_dim).

    The 27B divides by sqrt(embed / heads). GGUF does not store it; llama.cpp too
    recognises the 27B by its number of layers.
    """

    def finish(facts: Facts, config: Values) -> Values:
        is_27b = config["num_hidden_layers"] == layers_of_27b
        wide = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": wide if is_27b else config["head_dim"]}

    return finish


def _gemma3(facts: Facts, config: Values) -> Values:
    return {
        **_gemma_scale(62)(facts, config),
        "rope_local_base_freq": facts.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": facts.get("final_logit_softcapping"),
    }


def _phi3(facts: Facts, config: Values) -> Values:
    """Reads Phi-3's window (0 for none) and its two tables of RoPE factors."""
    limit = config["max_position_embeddings"]
    original = facts.get("rope.scaling.original_context_length", limit)
    long = facts.values("rope_factors_long.weight")
    short = facts.values("rope_factors_short.weight")
    fields: dict[str, object] = {
        "sliding_window": facts.get("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
    }
    stored = facts.get("rope.scaling.attn_factor")
    if long is None or short is None:
        return fields
    implied = math.sqrt(1 + math.log(max(limit / original, 1)) / math.log(original))
    if stored is not None and not math.isclose(stored, implied, rel_tol=1e-5):
        raise ValueError(
            "rope.scaling.attn_factor must be the longrope factor of its context "
            f"lengths, {implied:.6g}, got {stored:.6g}"
        )
    fields["rope_scaling"] = {
        "rope_type": "longrope",
        "long_factor": [float(str(value)) for value in long],
        "short_factor": [float(str(value)) for value in short],
    }
    return fields


LLAMA = Arch(
    model_type="llama",
    class_name="LlamaForCausalLM",
    rows={
        **ENDS,
        **NORMS,
        **with_interleaved_rope(with_all(ATTENTION, bias="attention_bias")),
        **with_all(MLP, bias="mlp_bias"),
    },
    fields={**SIZES, **RMS},
    constants=SILU,
    head_dim=True,
)
MIXTRAL = Arch(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    rows={
        **ENDS,
        **NORMS,
        **with_interleaved_rope(ATTENTION),
        "blk.{n}.ffn_gate_inp": TensorRow(to=BLOCK + "block_sparse_moe.gate"),
        "blk.{n}.ffn_gate_exps": TensorRow(
            to=BLOCK + "block_sparse_moe.experts.{e}.w1"
        ),
        "blk.{n}.ffn_down_exps": TensorRow(
            to=BLOCK + "block_sparse_moe.experts.{e}.w2"
        ),
        "blk.{n}.ffn_up_exps": TensorRow(to=BLOCK + "block_sparse_moe.experts.{e}.w3"),
    },
    fields={
        **SIZES,
        **RMS,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    constants={"sliding_window": None, **SILU},
    head_dim=True,
)
GRANITE = Arch(
    model_type="granite",
    class_name="GraniteForCausalLM",
    rows=LLAMA.rows,
    fields={
        **SIZES,
        **RMS,
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    # llama.cpp reads an absent scale as none; attention.scale then is head_dim ** -0.5,
    # which the config cannot express, so that one is required.
    defaults={"embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0},
    constants=SILU,
)
QWEN2 = Arch(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    rows={
        **PLAIN,
        **{
            stem: replace(row, bias=ALWAYS)
            for stem, row in ATTENTION.items()
            if not stem.endswith("output")
        },
    },
    fields={**SIZES, **RMS},
    constants={"use_sliding_window": False, **SILU},
)
_QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_EVERY_BLOCK = {"decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    rows={
        **{stem: row for stem, row in QWEN2.rows.items() if stem not in MLP},
        **EXPERTS,
        "blk.{n}.ffn_gate_inp_shexp": TensorRow(
            to=BLOCK + "mlp.shared_expert_gate", layout=one_row
        ),
        "blk.{n}.ffn_gate_shexp": TensorRow(to=BLOCK + "mlp.shared_expert.gate_proj"),
        "blk.{n}.ffn_up_shexp": TensorRow(to=BLOCK + "mlp.shared_expert.up_proj"),
        "blk.{n}.ffn_down_shexp": TensorRow(to=BLOCK + "mlp.shared_expert.down_proj"),
    },
    fields={
        **QWEN2.fields,
        **_QWEN_EXPERTS,
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    constants={**QWEN2.constants, **_EVERY_BLOCK, "norm_topk_prob": False},
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    rows={**PLAIN, **QK_NORMS},
    constants={"use_sliding_window": False, **NO_BIAS},
    head_dim=True,
)
QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    rows={**ENDS, **ATTENTION, **NORMS, **QK_NORMS, **EXPERTS},
    fields={**QWEN3.fields, **_QWEN_EXPERTS},
    # llama.cpp always normalises the chosen experts' weights here.
    constants={**QWEN3.constants, **_EVERY_BLOCK, "norm_topk_prob": True},
)
GEMMA = Arch(
    model_type="gemma",
    class_name="GemmaForCausalLM",
    rows=with_norms_less_one(
        {stem: row for stem, row in PLAIN.items() if stem != "output"},
    ),
    fields={**SIZES, **RMS},
    constants={
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    },
    head_dim=True,
)
_GEMMA_CONSTANTS = {
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    rows=with_norms_less_one(
        {
            "token_embd": ENDS["token_embd"],
            "output_norm": ENDS["output_norm"],
            **ATTENTION,
            **SANDWICH,
            **MLP,
        }
    ),
    fields={
        **GEMMA.fields,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
    },
    defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    constants={"tie_word_embeddings": True, **_GEMMA_CONSTANTS},
    finish=_gemma_scale(46),
)
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    rows=with_norms_less_one({**ENDS, **ATTENTION, **QK_NORMS, **SANDWICH, **MLP}),
    fields={**GEMMA.fields, "attention.sliding_window": "sliding_window"},
    defaults={"rope.freq_base": 1000000.0},
    constants={"sliding_window_pattern": 6, **_GEMMA_CONSTANTS},
    finish=_gemma3,
)
PHI3 = Arch(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    rows={
        **ENDS,
        **NORMS,
        "blk.{n}.attn_qkv": TensorRow(to=BLOCK + "self_attn.qkv_proj"),
        "blk.{n}.attn_output": TensorRow(to=BLOCK + "self_attn.o_proj"),
        "blk.{n}.ffn_up": TensorRow(to=BLOCK + "mlp.gate_up_proj"),
        "blk.{n}.ffn_down": TensorRow(to=BLOCK + "mlp.down_proj"),
    },
    fields={**SIZES, **RMS},
    constants=SILU,
    partial_rotary=True,
    finish=_phi3,
)
OLMO2 = Arch(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    rows={
        **ENDS,
        **ATTENTION,
        **QK_NORMS,
        **MLP,
        "blk.{n}.post_attention_norm": NORMS["blk.{n}.ffn_norm"],
        "blk.{n}.post_ffw_norm": SANDWICH["blk.{n}.post_ffw_norm"],
    },
    fields={**SIZES, **RMS},
    constants=NO_BIAS,
)
OLMOE = Arch(
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    rows={**ENDS, **ATTENTION, **NORMS, **QK_NORMS, **EXPERTS},
    fields={
        **SIZES,
        **RMS,
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    # llama.cpp leaves the weights of the chosen experts as the softmax has them.
    constants={"norm_topk_prob": False, "clip_qkv": None, **NO_BIAS},
)
_HALVES = Fuse(axis=1)
GRANITE_MOE = replace(
    GRANITE,
    model_type="granitemoe",
    class_name="GraniteMoeForCausalLM",
    rows={
        **ENDS,
        **NORMS,
        **with_interleaved_rope(ATTENTION),
        "blk.{n}.ffn_gate_inp": TensorRow(to=BLOCK + "block_sparse_moe.router.layer"),
        "blk.{n}.ffn_gate_exps": TensorRow(
            to=BLOCK + "block_sparse_moe.input_linear", fuse=_HALVES
        ),
        "blk.{n}.ffn_up_exps": TensorRow(
            to=BLOCK + "block_sparse_moe.input_linear", fuse=_HALVES
        ),
        "blk.{n}.ffn_down_exps": TensorRow(to=BLOCK + "block_sparse_moe.output_linear"),
    },
    fields={
        **GRANITE.fields,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    constants=NO_BIAS,
)
GLM4 = Arch(
    model_type="glm4",
    class_name="Glm4ForCausalLM",
    rows={
        **ENDS,
        **{
            stem: replace(row, bias=NEVER if "output" in stem else "attention_bias")
            for stem, row in ATTENTION.items()
        },
        "blk.{n}.attn_norm": TensorRow(to=BLOCK + "input_layernorm"),
        "blk.{n}.post_attention_norm": TensorRow(to=BLOCK + "post_self_attn_layernorm"),
        "blk.{n}.ffn_norm": TensorRow(to=BLOCK + "post_attention_layernorm"),
        "blk.{n}.post_ffw_norm": TensorRow(to=BLOCK + "post_mlp_layernorm"),
        "blk.{n}.ffn_up": TensorRow(to=BLOCK + "mlp.gate_up_proj"),
        "blk.{n}.ffn_down": TensorRow(to=BLOCK + "mlp.down_proj"),
    },
    fields={**SIZES, **RMS},
    constants=SILU,
    head_dim=True,
    partial_rotary=True,
)
