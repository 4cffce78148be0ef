"""Cases of the GGUF architectures with RMSNorm, and of their variants."""

from typing import Any

import gguf
import numpy as np
import transformers as hf

from tests.converters.gguf.sizes import RMS, SIZES, rotated, vocab_and_rotary
from tests.converters.gguf.writer import (
    Case,
    fused_experts,
    llama_rows,
    mixtral,
    norms_plus_one,
    stacked,
    stacked_and_squeezed,
)

LLAMA3: dict[str, Any] = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def llama3_factors(dim: int) -> np.ndarray:
    inverse, _ = hf.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](
        hf.LlamaConfig(**{**SIZES, "head_dim": dim}, rope_parameters=LLAMA3), "cpu"
    )
    plain = LLAMA3["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    return (plain / inverse.numpy()).astype(np.float32)


def granite(writer: gguf.GGUFWriter, config: Any) -> None:
    vocab_and_rotary(writer, config)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def qwen_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    shared = config.to_dict().get("shared_expert_intermediate_size")
    if shared is not None:
        writer.add_expert_shared_feed_forward_length(shared)


def gemma2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def gemma3(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)


def phi3(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    share = rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(
        int(share * config.hidden_size) // config.num_attention_heads
    )
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_sliding_window(config.sliding_window or 0)
    if "long_factor" in rope:
        ratio = config.max_position_embeddings / config.original_max_position_embeddings
        writer.add_rope_scaling_attn_factors(
            float(
                np.sqrt(
                    1 + np.log(ratio) / np.log(config.original_max_position_embeddings)
                )
            )
        )


_MOE: dict[str, Any] = {
    **RMS,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_LONG: dict[str, Any] = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0, 1.25, 1.5],
    long_factor=[1.0, 2.5, 8.0],
    partial_rotary_factor=0.75,
)


def glm4(writer: gguf.GGUFWriter, config: Any) -> None:
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config.head_dim * share))


RMSNORM: dict[str, Case] = {
    "llama": Case(
        arch="llama",
        config=hf.LlamaConfig(**{**RMS, "head_dim": 16}, tie_word_embeddings=False),
        change=llama_rows,
        extra=vocab_and_rotary,
    ),
    "llama with biases, tied": Case(
        arch="llama",
        config=hf.LlamaConfig(
            **RMS, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
        ),
        change=llama_rows,
        extra=vocab_and_rotary,
    ),
    "llama 3 rope": Case(
        arch="llama",
        config=hf.LlamaConfig(**{**RMS, "head_dim": 64}, rope_parameters=LLAMA3),
        change=llama_rows,
        extra=vocab_and_rotary,
        raw={"rope_freqs.weight": llama3_factors(64)},
    ),
    "llama linear rope": Case(
        arch="llama",
        config=hf.LlamaConfig(
            **RMS,
            rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=20000.0),
        ),
        change=llama_rows,
        extra=vocab_and_rotary,
    ),
    "llama yarn": Case(
        arch="llama",
        config=hf.LlamaConfig(
            **RMS,
            rope_parameters=dict(
                rope_type="yarn",
                factor=4.0,
                rope_theta=10000.0,
                original_max_position_embeddings=16,
            ),
        ),
        change=llama_rows,
        extra=vocab_and_rotary,
    ),
    "mistral": Case(
        arch="llama",
        config=hf.MistralConfig(**{**RMS, "head_dim": 8}, sliding_window=None),
        change=llama_rows,
        extra=vocab_and_rotary,
    ),
    "mixtral": Case(
        arch="llama",
        config=hf.MixtralConfig(**RMS, num_local_experts=4),
        change=mixtral,
        extra=vocab_and_rotary,
    ),
    "granite": Case(
        arch="granite",
        config=hf.GraniteConfig(
            **RMS,
            attention_multiplier=0.25,
            embedding_multiplier=12.0,
            residual_multiplier=0.5,
            logits_scaling=8.0,
        ),
        change=llama_rows,
        extra=granite,
    ),
    "qwen2": Case(arch="qwen2", config=hf.Qwen2Config(**RMS)),
    "qwen2 tied": Case(
        arch="qwen2", config=hf.Qwen2Config(**RMS, tie_word_embeddings=True)
    ),
    "qwen2moe": Case(
        arch="qwen2moe",
        config=hf.Qwen2MoeConfig(**_MOE, shared_expert_intermediate_size=24),
        change=stacked,
        extra=qwen_experts,
    ),
    "qwen2moe, gate without its axis": Case(
        arch="qwen2moe",
        config=hf.Qwen2MoeConfig(**_MOE, shared_expert_intermediate_size=24),
        change=stacked_and_squeezed,
        extra=qwen_experts,
    ),
    "qwen3": Case(arch="qwen3", config=hf.Qwen3Config(**{**RMS, "head_dim": 16})),
    "qwen3moe": Case(
        arch="qwen3moe",
        config=hf.Qwen3MoeConfig(**{**_MOE, "head_dim": 16}, norm_topk_prob=True),
        change=stacked,
        extra=qwen_experts,
    ),
    "gemma": Case(
        arch="gemma",
        config=hf.GemmaConfig(**{**RMS, "head_dim": 16}),
        change=norms_plus_one,
    ),
    "gemma2": Case(
        arch="gemma2",
        config=hf.Gemma2Config(
            **{**RMS, "head_dim": 16},
            query_pre_attn_scalar=16,
            sliding_window=8,
            attn_logit_softcapping=0.5,
            final_logit_softcapping=2.0,
        ),
        change=norms_plus_one,
        extra=gemma2,
    ),
    "gemma3": Case(
        arch="gemma3",
        config=hf.Gemma3TextConfig(
            **{**RMS, "head_dim": 16, "num_hidden_layers": 7},
            query_pre_attn_scalar=16,
            sliding_window=8,
        ),
        change=norms_plus_one,
        extra=gemma3,
    ),
    "phi3": Case(
        arch="phi3",
        config=hf.Phi3Config(
            **RMS, sliding_window=12, original_max_position_embeddings=64
        ),
        extra=phi3,
    ),
    "phi3 longrope, partly rotated": Case(
        arch="phi3",
        config=hf.Phi3Config(
            **RMS, original_max_position_embeddings=16, rope_parameters=_LONG
        ),
        extra=phi3,
        raw={
            "rope_factors_long.weight": np.array(_LONG["long_factor"], np.float32),
            "rope_factors_short.weight": np.array(_LONG["short_factor"], np.float32),
        },
    ),
    "olmo2": Case(arch="olmo2", config=hf.Olmo2Config(**RMS)),
    "granitemoe": Case(
        arch="granitemoe",
        config=hf.GraniteMoeConfig(
            **RMS,
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_multiplier=0.25,
            embedding_multiplier=12.0,
            residual_multiplier=0.5,
            logits_scaling=8.0,
        ),
        change=fused_experts,
        extra=granite,
    ),
    "olmoe": Case(
        arch="olmoe",
        config=hf.OlmoeConfig(**RMS, num_experts=4, num_experts_per_tok=2),
        change=stacked,
    ),
    "glm4": Case(
        arch="glm4",
        config=hf.Glm4Config(
            **{**RMS, "head_dim": 16},
            attention_bias=True,
            rope_parameters={**rotated(0.5), "rope_theta": 20000.0},
        ),
        extra=glm4,
    ),
}
