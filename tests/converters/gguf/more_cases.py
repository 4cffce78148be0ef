"""Rows for architectures whose layers differ, and for those of other projects."""

from typing import Any

import gguf
import transformers as hf

from tests.converters.gguf.cases import CASES as FIRST
from tests.converters.gguf.cases import RMS, SIZES, granite, rotated, vocab_and_rotary
from tests.converters.gguf.latent_cases import LATENT
from tests.converters.gguf.writer import (
    EMBED,
    HEADS,
    Case,
    fused_experts,
    gpt_oss_experts,
    llama_rows,
    neox_qkv,
    stacked,
)

EIGHT_LAYERS: dict[str, Any] = {**RMS, "num_hidden_layers": 8}
OLMO3: dict[str, Any] = {**EIGHT_LAYERS, "sliding_window": 8}
OLMO3.pop("rope_theta")
TURN: dict[str, Any] = dict(rope_type="default", rope_theta=20000.0)
YARN: dict[str, Any] = dict(
    rope_type="yarn",
    rope_theta=20000.0,
    factor=4.0,
    attention_factor=1.25,
    original_max_position_embeddings=16,
)
PLAIN: dict[str, Any] = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}


def windows(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window_pattern(kinds)


def olmo3_yarn(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_rope_scaling_attn_factors(YARN["attention_factor"])
    windows(writer, config)


def exaone4(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    if config.sliding_window is not None:
        windows(writer, config)


def cohere2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)
    writer.add_sliding_window(config.sliding_window)
    vocab_and_rotary(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def olmo(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_layer_norm_eps(1e-5)
    if config.clip_qkv is not None:
        writer.add_clamp_kqv(config.clip_qkv)


def glm4(writer: gguf.GGUFWriter, config: Any) -> None:
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config.head_dim * share))


def phi2(writer: gguf.GGUFWriter, config: Any) -> None:
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(4 * config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_rope_dimension_count(int(share * EMBED) // HEADS)
    writer.add_add_bos_token(False)


def neox(writer: gguf.GGUFWriter, config: Any) -> None:
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(int(share * (EMBED // HEADS)))
    writer.add_head_count(config.num_attention_heads)
    writer.add_parallel_residual(config.use_parallel_residual)
    writer.add_layer_norm_eps(config.layer_norm_eps)


_MORE: dict[str, Case] = {
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
    "cohere2": Case(
        arch="cohere2",
        config=hf.Cohere2Config(
            **{**SIZES, "num_hidden_layers": 8}, logit_scale=0.5, sliding_window=8
        ),
        extra=cohere2,
    ),
    "olmo": Case(
        arch="olmo",
        config=hf.OlmoConfig(**SIZES, clip_qkv=0.5),
        change=llama_rows,
        extra=olmo,
    ),
    "olmo tied, not clipped": Case(
        arch="olmo",
        config=hf.OlmoConfig(**SIZES, tie_word_embeddings=True),
        change=llama_rows,
        extra=olmo,
    ),
    "olmo3": Case(
        arch="olmo2",
        config=hf.Olmo3Config(
            **OLMO3, rope_parameters={"full_attention": TURN, "sliding_attention": TURN}
        ),
        extra=windows,
    ),
    "olmo3 yarn": Case(
        arch="olmo2",
        config=hf.Olmo3Config(
            **OLMO3,
            rope_parameters={"full_attention": YARN, "sliding_attention": TURN},
        ),
        extra=olmo3_yarn,
    ),
    "olmoe": Case(
        arch="olmoe",
        config=hf.OlmoeConfig(**RMS, num_experts=4, num_experts_per_tok=2),
        change=stacked,
    ),
    "phi2": Case(
        arch="phi2",
        config=hf.PhiConfig(
            **{**PLAIN, "intermediate_size": 4 * EMBED}, rope_parameters=rotated(0.5)
        ),
        extra=phi2,
        is_listed=False,
    ),
    "gptneox": Case(
        arch="gptneox",
        config=hf.GPTNeoXConfig(**PLAIN, rope_parameters=rotated(0.25)),
        change=neox_qkv,
        extra=neox,
        is_listed=False,
    ),
    "gptneox one after the other, tied": Case(
        arch="gptneox",
        config=hf.GPTNeoXConfig(
            **PLAIN,
            rope_parameters=rotated(1.0),
            use_parallel_residual=False,
            tie_word_embeddings=True,
        ),
        change=neox_qkv,
        extra=neox,
        is_listed=False,
    ),
    "smollm3": Case(
        arch="smollm3",
        config=hf.SmolLM3Config(**EIGHT_LAYERS),
        change=llama_rows,
        extra=vocab_and_rotary,
    ),
    "exaone4 with windows": Case(
        arch="exaone4",
        config=hf.Exaone4Config(**{**EIGHT_LAYERS, "head_dim": 16}, sliding_window=8),
        extra=exaone4,
    ),
    "exaone4": Case(
        arch="exaone4",
        config=hf.Exaone4Config(
            **{**RMS, "head_dim": 8},
            sliding_window=None,
            layer_types=["full_attention"] * RMS["num_hidden_layers"],
            tie_word_embeddings=True,
        ),
        extra=exaone4,
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
    "gpt-oss": Case(
        arch="gpt-oss",
        config=hf.GptOssConfig(
            **{**RMS, "head_dim": 16, "num_hidden_layers": 4},
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            rope_parameters=dict(
                rope_type="yarn",
                factor=4.0,
                rope_theta=150000.0,
                original_max_position_embeddings=16,
                truncate=False,
            ),
        ),
        change=gpt_oss_experts,
        extra=gpt_oss,
    ),
}
CASES = {**FIRST, **_MORE, **LATENT}
