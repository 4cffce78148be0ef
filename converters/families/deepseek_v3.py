"""DeepSeek V3 and R1: latent attention, grouped experts, leading dense layers."""

from dew.converters.config import transforms
from dew.converters.config.fields import Inert, Only, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import FROM_HEADS, HEADS, Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP, MoE

FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    # transformers has no router loss for this family.
    "output_router_logits": Inert(False),
    "router_aux_loss_coef": Inert(0.001),
    "vocab_size": Use("vocab", 129280),
    "hidden_size": Use("embed", 7168),
    "num_hidden_layers": Use("layers", 61),
    "num_attention_heads": Use(("attention.heads", "attention.kv_heads"), 128),
    # Latent attention has keys for every head.
    "num_key_value_heads": Inert(128),
    "qk_nope_head_dim": Use(
        "attention.head_dim",
        128,
        read=lambda nope_dim, rope_dim: nope_dim + rope_dim,
        inputs=("qk_rope_head_dim",),
    ),
    "qk_rope_head_dim": Use("attention.latent.rope_dim", 64),
    # Both follow from the two above.
    "head_dim": Read(64),
    "qk_head_dim": Inert(192),
    "v_head_dim": Use("attention.latent.value_dim", 128),
    "kv_lora_rank": Use("attention.latent.rank", 512),
    "q_lora_rank": Use("attention.latent.query_rank", 1536, nullable=True),
    "attention_bias": Use(("attention.latent.bias", "attention.out_bias"), False),
    "rope_interleave": Only(True),
    "intermediate_size": Use("dense.dim", 18432),
    "hidden_act": Use(
        ("mlp.activation", "mlp.shared.activation", "dense.activation"),
        "silu",
        choices=ACTIVATIONS,
    ),
    "first_k_dense_replace": Use("dense_layers", 3, read=transforms.first_layers),
    "n_routed_experts": Use("mlp.experts", 256),
    "num_experts_per_tok": Use("mlp.top_k", 8),
    "moe_intermediate_size": Use("mlp.dim", 2048),
    "n_shared_experts": Use(
        "mlp.shared.dim",
        1,
        read=lambda count, dim: count * dim,
        inputs=("moe_intermediate_size",),
    ),
    "n_group": Use("mlp.groups", 8),
    "topk_group": Use("mlp.top_groups", 4),
    "norm_topk_prob": Use("mlp.normalize", True),
    "routed_scaling_factor": Use("mlp.scale", 2.5),
    "scoring_func": Only("sigmoid"),
    "topk_method": Only("noaux_tc"),
    # DeepSeek's own code reads it and transformers does not.
    "moe_layer_freq": Only(1),
    "rms_norm_eps": Use("norm.eps", 1e-6),
    "max_position_embeddings": Read(4096),
    # Training options, and options of old implementations.
    **{
        name: Inert()
        for name in (
            "aux_loss_alpha",
            "ep_size",
            "num_nextn_predict_layers",
            "pretraining_tp",
            "seq_aux",
        )
    },
}

ATTN, MLP_ = shared.ATTN, shared.LAYER + "mlp."
TO = "layers/{n}/attn/"
RULES = (
    *shared.EMBED,
    *shared.BEFORE,
    *shared.DENSE,
    *shared.EXPERTS,
    Rule(ATTN + "q_proj.weight", TO + "q/weight", HEADS),
    Rule(ATTN + "q_a_proj.{kind}", TO + "q_down/{kind}"),
    Rule(ATTN + "q_a_layernorm.weight", TO + "q_norm/weight"),
    Rule(ATTN + "q_b_proj.weight", TO + "q_up/weight", HEADS),
    Rule(ATTN + "kv_a_proj_with_mqa.{kind}", TO + "kv_down/{kind}"),
    Rule(ATTN + "kv_a_layernorm.weight", TO + "kv_norm/weight"),
    Rule(ATTN + "kv_b_proj.weight", TO + "kv_up/weight", HEADS),
    Rule(ATTN + "o_proj.weight", TO + "o/weight", FROM_HEADS),
    Rule(ATTN + "o_proj.bias", TO + "o/bias"),
    Rule(MLP_ + "gate.e_score_correction_bias", "moe/layers/{n}/mlp/router/bias"),
    Rule(MLP_ + "shared_experts.{x}_proj.{kind}", "layers/{n}/mlp/shared/{x}/{kind}"),
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM", "DeepseekV3Model"),
    fields=FIELDS,
    aliases={"num_local_experts": "n_routed_experts"},
    ropes=(
        RopeFields(
            head_dim="qk_rope_head_dim", interleaved=True, uses_mscale_all_dim=True
        ),
    ),
    constants={"mlp.scoring": "sigmoid", "mlp.balanced": True},
    parts={"mlp": MoE, "mlp.shared": MLP},
    rules=RULES,
    copies=(TIED_HEAD,),
)
