"""Sizes and metadata that cases of several architecture groups share."""

from typing import Any

import gguf

from tests.converters.gguf.writer import BLOCKS, EMBED, HEADS, KV_HEADS, MLP, VOCAB

SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=EMBED,
    intermediate_size=MLP,
    num_hidden_layers=BLOCKS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
RMS: dict[str, Any] = {**SIZES, "rms_norm_eps": 1e-3, "rope_theta": 20000.0}


def vocab_and_rotary(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(
        config.to_dict().get("head_dim")
        or config.hidden_size // config.num_attention_heads
    )


def rotated(share: float) -> dict[str, Any]:
    return dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=share)
