"""Rows for DeepSeek V2 and V3, in files before and after heads were split."""

from typing import Any

import gguf
import transformers as hf

from tests.converters.gguf.sizes import RMS
from tests.converters.gguf.writer import HEADS, Case, latent_split, latent_whole

SIZES: dict[str, Any] = {
    **{name: value for name, value in RMS.items() if name != "rope_theta"},
    "num_key_value_heads": HEADS,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
PLAIN: dict[str, Any] = dict(rope_type="default", rope_theta=20000.0)


def yarn(mscale: float) -> dict[str, Any]:
    return dict(
        rope_type="yarn",
        rope_theta=20000.0,
        factor=4.0,
        original_max_position_embeddings=16,
        beta_fast=32,
        beta_slow=1,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


def _common(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if config.model_type == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    rope = config.rope_parameters
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def earlier(writer: gguf.GGUFWriter, config: Any) -> None:
    _common(writer, config)
    writer.add_key_length(config.qk_head_dim)
    writer.add_value_length(config.v_head_dim)
    if config.n_group > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def later(writer: gguf.GGUFWriter, config: Any) -> None:
    _common(writer, config)
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


LATENT: dict[str, Case] = {
    "deepseek2, a lite V2": Case(
        arch="deepseek2",
        config=hf.DeepseekV2Config(
            **SIZES,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            rope_parameters=yarn(0.707),
        ),
        change=latent_split,
        extra=later,
    ),
    "deepseek2, V2 with groups, kv_b whole": Case(
        arch="deepseek2",
        config=hf.DeepseekV2Config(
            **SIZES,
            q_lora_rank=20,
            n_group=4,
            topk_group=2,
            topk_method="group_limited_greedy",
            routed_scaling_factor=16.0,
            rope_parameters=yarn(0.707),
        ),
        change=latent_whole,
        extra=earlier,
    ),
    "deepseek2, V3": Case(
        arch="deepseek2",
        config=hf.DeepseekV3Config(
            **SIZES,
            q_lora_rank=20,
            n_group=4,
            topk_group=2,
            rope_parameters=yarn(1.0),
        ),
        change=latent_split,
        extra=later,
    ),
    "deepseek2, V3 with full queries, kv_b whole": Case(
        arch="deepseek2",
        config=hf.DeepseekV3Config(
            **SIZES,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            rope_parameters=PLAIN,
        ),
        change=latent_whole,
        extra=earlier,
    ),
}
