"""Tiny random configs of all native families, each with variants."""

from collections.abc import Mapping
from typing import Any

import transformers as hf

from tests.converters.families.case import SIZES, VOCAB, WIDTH, Tiny, without
from tests.converters.families.encoders import ENCODERS

GROUPED: Mapping[str, Any] = {**SIZES, "num_key_value_heads": 2}
GPT_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": VOCAB - 1,
}
GPT: Mapping[str, Any] = {**GPT_SIZES, "n_embd": WIDTH, "n_positions": 64}
MIXED: Mapping[str, Any] = {
    **GROUPED,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


DECODERS: Mapping[str, Tiny] = {
    "llama": Tiny(
        config=hf.LlamaConfig,
        fields=GROUPED,
        variants=(
            {"head_dim": 16, "num_key_value_heads": 1},
            {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        ),
    ),
    "mistral": Tiny(
        config=hf.MistralConfig,
        fields={**GROUPED, "sliding_window": 8},
        variants=({"sliding_window": None, "head_dim": 16},),
    ),
    "qwen2": Tiny(
        config=hf.Qwen2Config,
        fields={
            **GROUPED,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
        variants=({"use_sliding_window": False, "tie_word_embeddings": True},),
    ),
    "qwen3": Tiny(
        config=hf.Qwen3Config,
        fields={**GROUPED, "head_dim": 16},
        variants=({"attention_bias": True}, WINDOWS | {"use_sliding_window": True}),
    ),
    "smollm3": Tiny(
        config=hf.SmolLM3Config,
        fields={**GROUPED, "no_rope_layer_interval": 2},
        variants=(
            {"use_sliding_window": True, "sliding_window": 8},
            {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        ),
    ),
    "granite": Tiny(
        config=hf.GraniteConfig,
        fields={
            **GROUPED,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
        variants=({"attention_bias": True, "mlp_bias": True},),
    ),
    "olmo": Tiny(
        config=hf.OlmoConfig,
        fields={**GROUPED, "clip_qkv": 0.5},
        variants=({"clip_qkv": None, "attention_bias": True},),
    ),
    "olmo2": Tiny(
        config=hf.Olmo2Config,
        fields=GROUPED,
        variants=({"attention_bias": True, "tie_word_embeddings": True},),
    ),
    "olmo3": Tiny(
        config=hf.Olmo3Config,
        fields={**GROUPED, **WINDOWS},
        variants=({"attention_bias": True},),
    ),
    "exaone4": Tiny(
        config=hf.Exaone4Config,
        fields={**GROUPED, **WINDOWS, "sliding_window_pattern": 2},
        variants=({"sliding_window": None, "layer_types": ["full_attention"] * 2},),
    ),
    "gemma": Tiny(
        config=hf.GemmaConfig,
        fields={**GROUPED, "head_dim": 8},
        variants=({"attention_bias": True, "tie_word_embeddings": False},),
    ),
    "gemma2": Tiny(
        config=hf.Gemma2Config,
        fields={
            **GROUPED,
            **WINDOWS,
            "head_dim": 8,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        variants=({"attn_logit_softcapping": None, "final_logit_softcapping": None},),
    ),
    "gemma3_text": Tiny(
        config=hf.Gemma3TextConfig,
        fields={**GROUPED, **WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 16},
        variants=({"final_logit_softcapping": 3.0},),
    ),
    "phi3": Tiny(
        config=hf.Phi3Config,
        fields=GROUPED,
        variants=({"sliding_window": 8}, {"tie_word_embeddings": True}),
    ),
    "starcoder2": Tiny(
        config=hf.Starcoder2Config,
        fields=GROUPED,
        variants=({"sliding_window": 8, "use_bias": False},),
    ),
    "stablelm": Tiny(
        config=hf.StableLmConfig,
        fields={**GROUPED, "qk_layernorm": True},
        variants=(
            {"use_parallel_residual": True, "use_qkv_bias": True},
            {"qk_layernorm": False},
        ),
    ),
    "cohere": Tiny(
        config=hf.CohereConfig,
        fields={**GROUPED, "use_qk_norm": True},
        variants=({"use_qk_norm": False, "attention_bias": True},),
    ),
    "cohere2": Tiny(
        config=hf.Cohere2Config,
        fields={**GROUPED, **WINDOWS},
        variants=({"attention_bias": True, "logit_scale": 1.5},),
    ),
    "glm4": Tiny(
        config=hf.Glm4Config,
        fields={**GROUPED, "head_dim": 16},
        variants=({"attention_bias": False, "tie_word_embeddings": True},),
    ),
    "gpt2": Tiny(
        config=hf.GPT2Config,
        fields=GPT,
        variants=(
            {"n_inner": 40, "tie_word_embeddings": False},
            {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
        ),
        positions="n_positions",
    ),
    "gptj": Tiny(
        config=hf.GPTJConfig,
        fields={**GPT, "rotary_dim": 4},
        variants=({"n_inner": 40, "tie_word_embeddings": True},),
        positions="n_positions",
    ),
    "gpt_neox": Tiny(
        config=hf.GPTNeoXConfig,
        fields=SIZES,
        variants=({"use_parallel_residual": False, "attention_bias": False},),
    ),
    "phi": Tiny(
        config=hf.PhiConfig,
        fields=GROUPED,
        variants=({"qk_layernorm": True},),
    ),
    "opt": Tiny(
        config=hf.OPTConfig,
        fields={
            **without(SIZES, "intermediate_size", "initializer_range"),
            "ffn_dim": 48,
            "word_embed_proj_dim": WIDTH,
            "init_std": 0.25,
        },
        variants=(
            {"enable_bias": False, "layer_norm_elementwise_affine": False},
            {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
            {"word_embed_proj_dim": 20, "tie_word_embeddings": False},
        ),
        positions="max_position_embeddings",
    ),
    "bloom": Tiny(
        config=hf.BloomConfig,
        fields={**GPT_SIZES, "hidden_size": WIDTH},
        variants=({"n_head": 2, "tie_word_embeddings": False},),
    ),
    "falcon": Tiny(
        config=hf.FalconConfig,
        fields={
            **without(SIZES, "intermediate_size"),
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
        },
        variants=(
            {"new_decoder_architecture": False, "bias": True},
            {"new_decoder_architecture": False, "parallel_attn": False},
            {
                "new_decoder_architecture": False,
                "multi_query": False,
                "num_kv_heads": None,
            },
            {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False},
        ),
    ),
    "mixtral": Tiny(
        config=hf.MixtralConfig,
        fields={**GROUPED, "num_local_experts": 4},
        variants=({"sliding_window": 8, "head_dim": 16},),
    ),
    "qwen2_moe": Tiny(
        config=hf.Qwen2MoeConfig,
        fields={**MIXED, "num_experts": 4, "shared_expert_intermediate_size": 40},
        variants=(
            {"norm_topk_prob": True, "qkv_bias": False},
            {
                "num_hidden_layers": 4,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [3],
                "use_sliding_window": True,
                "sliding_window": 8,
            },
            {"mlp_only_layers": [0]},
        ),
    ),
    "qwen3_moe": Tiny(
        config=hf.Qwen3MoeConfig,
        fields={**MIXED, "num_experts": 4},
        variants=(
            {"norm_topk_prob": True, "attention_bias": True},
            {"decoder_sparse_step": 2, "num_hidden_layers": 3},
            {"use_sliding_window": True, "sliding_window": 8, "mlp_only_layers": [1]},
        ),
    ),
    "olmoe": Tiny(
        config=hf.OlmoeConfig,
        fields={**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
        variants=({"norm_topk_prob": True, "clip_qkv": 0.5},),
    ),
    "granitemoe": Tiny(
        config=hf.GraniteMoeConfig,
        fields={
            **GROUPED,
            "num_local_experts": 4,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
        variants=({"attention_bias": True},),
    ),
    "gpt_oss": Tiny(
        config=hf.GptOssConfig,
        fields={
            **GROUPED,
            **WINDOWS,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        variants=({"swiglu_limit": 1.0, "head_dim": 16},),
    ),
    "deepseek_v2": Tiny(
        config=hf.DeepseekV2Config,
        fields={
            **MIXED,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "kv_lora_rank": 16,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
        variants=(
            {"q_lora_rank": None, "topk_method": "greedy", "first_k_dense_replace": 0},
            {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "mscale": 0.707,
                    "mscale_all_dim": 0.9,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
    ),
    "deepseek_v3": Tiny(
        config=hf.DeepseekV3Config,
        fields={
            **MIXED,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
        variants=(
            {"q_lora_rank": None, "n_shared_experts": 2},
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.8,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
    ),
}
TINY: Mapping[str, Tiny] = {**DECODERS, **ENCODERS}
"""By `model_type`."""
