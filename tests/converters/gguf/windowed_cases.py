"""Cases of the GGUF architectures whose layers differ in windows or RoPE."""

from typing import Any

import gguf
import transformers as hf

from tests.converters.gguf.sizes import RMS, SIZES, vocab_and_rotary
from tests.converters.gguf.writer import Case, gpt_oss_experts, llama_rows

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


WINDOWED: dict[str, Case] = {
    "cohere2": Case(
        arch="cohere2",
        config=hf.Cohere2Config(
            **{**SIZES, "num_hidden_layers": 8}, logit_scale=0.5, sliding_window=8
        ),
        extra=cohere2,
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
