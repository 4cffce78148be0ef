"""Cases of the GGUF architectures with LayerNorm, and of their variants."""

from typing import Any

import gguf
import transformers as hf

from tests.converters.gguf.sizes import SIZES, rotated
from tests.converters.gguf.writer import (
    BLOCKS,
    EMBED,
    HEADS,
    VOCAB,
    Case,
    bloom_qkv,
    falcon_qkv,
    llama_rows,
    neox_qkv,
    stacked,
    transposed,
)


def gpt2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def bloom(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(4 * config.hidden_size)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def falcon(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(2048)
    writer.add_tensor_data_layout("jploski")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(4 * config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if config.multi_query else config.num_kv_heads)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def stablelm(writer: gguf.GGUFWriter, config: Any) -> None:
    dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(
        int(config.rope_parameters["partial_rotary_factor"] * dim)
    )
    writer.add_parallel_residual(config.use_parallel_residual)


def cohere(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


_FALCON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=EMBED,
    num_hidden_layers=BLOCKS,
    num_attention_heads=HEADS,
    alibi=False,
    bias=False,
    bos_token_id=None,
    eos_token_id=None,
)
PLAIN: dict[str, Any] = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}


def olmo(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_layer_norm_eps(1e-5)
    if config.clip_qkv is not None:
        writer.add_clamp_kqv(config.clip_qkv)


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


LAYERNORM: dict[str, Case] = {
    "gpt2": Case(
        arch="gpt2",
        config=hf.GPT2Config(
            vocab_size=VOCAB, n_embd=EMBED, n_layer=BLOCKS, n_head=HEADS, n_positions=64
        ),
        change=transposed,
        extra=gpt2,
        is_listed=False,
    ),
    "bloom": Case(
        arch="bloom",
        config=hf.BloomConfig(
            vocab_size=VOCAB, hidden_size=EMBED, n_layer=BLOCKS, n_head=HEADS
        ),
        change=bloom_qkv,
        extra=bloom,
        is_listed=False,
    ),
    "falcon, one kv head": Case(
        arch="falcon",
        config=hf.FalconConfig(**_FALCON, multi_query=True),
        change=falcon_qkv,
        extra=falcon,
        is_listed=False,
    ),
    "falcon, two norms": Case(
        arch="falcon",
        config=hf.FalconConfig(
            **_FALCON,
            new_decoder_architecture=True,
            num_kv_heads=2,
            multi_query=False,
            tie_word_embeddings=False,
        ),
        change=falcon_qkv,
        extra=falcon,
        is_listed=False,
    ),
    "falcon, grouped heads, one norm": Case(
        arch="falcon",
        config=hf.FalconConfig(
            **_FALCON,
            new_decoder_architecture=True,
            num_kv_heads=2,
            multi_query=False,
            num_ln_in_parallel_attn=1,
        ),
        change=falcon_qkv,
        extra=falcon,
        is_listed=False,
    ),
    "starcoder2": Case(
        arch="starcoder2",
        config=hf.Starcoder2Config(**SIZES, sliding_window=None, norm_epsilon=1e-5),
    ),
    "stablelm": Case(
        arch="stablelm",
        config=hf.StableLmConfig(
            **SIZES,
            use_qkv_bias=True,
            qk_layernorm=True,
            rope_parameters=rotated(0.25),
        ),
        change=stacked,
        extra=stablelm,
    ),
    "stablelm in parallel": Case(
        arch="stablelm",
        config=hf.StableLmConfig(
            **SIZES, use_parallel_residual=True, rope_parameters=rotated(0.5)
        ),
        extra=stablelm,
    ),
    "command-r": Case(
        arch="command-r", config=hf.CohereConfig(**SIZES, logit_scale=0.5), extra=cohere
    ),
    "command-r with norms": Case(
        arch="command-r",
        config=hf.CohereConfig(**SIZES, logit_scale=0.5, use_qk_norm=True),
        extra=cohere,
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
}
