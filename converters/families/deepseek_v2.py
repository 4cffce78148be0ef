"""DeepSeek V2: V3 with softmax routing and no routing bias.

A group of experts ranks by its best expert, not by the sum of its best two.
"""

from dew.converters.config import transforms
from dew.converters.config.fields import MultiUse, Only, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import deepseek_v3
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP, MoE

METHODS = (transforms.GREEDY, transforms.LIMITED)
FIELDS = {
    **deepseek_v3.FIELDS,
    "vocab_size": Use("vocab", 102400),
    "hidden_size": Use("embed", 4096),
    "num_hidden_layers": Use("layers", 32),
    "num_attention_heads": Use(("attention.heads", "attention.kv_heads"), 32),
    "intermediate_size": Use("dense.dim", 11008),
    "mlp_bias": Use(("dense.bias", "mlp.shared.bias"), False),
    "first_k_dense_replace": Use("dense_layers", 0, read=transforms.first_layers),
    "n_routed_experts": Use("mlp.experts", 64),
    "num_experts_per_tok": Use("mlp.top_k", None, read=transforms.required_number),
    "moe_intermediate_size": Use("mlp.dim", 1407),
    "n_shared_experts": Use(
        "mlp.shared.dim",
        2,
        read=lambda count, dim: count * dim,
        inputs=("moe_intermediate_size",),
    ),
    "n_group": Read(None),
    "topk_group": Read(None),
    "topk_method": MultiUse(
        Use(
            "mlp.groups",
            transforms.GREEDY,
            read=transforms.group_count,
            inputs=("n_group",),
            choices=METHODS,
        ),
        Use(
            "mlp.top_groups",
            transforms.GREEDY,
            read=transforms.group_count,
            inputs=("topk_group",),
            choices=METHODS,
        ),
    ),
    # DeepSeek's own code reads it and transformers does not.
    "norm_topk_prob": Only(False, None),
    "routed_scaling_factor": Use("mlp.scale", 1.0),
    "scoring_func": Only("softmax"),
    "max_position_embeddings": Read(2048),
}

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM", "DeepseekV2Model"),
    fields=FIELDS,
    aliases={"num_experts": "n_routed_experts"},
    ropes=(
        RopeFields(
            head_dim="qk_rope_head_dim",
            interleaved=True,
            uses_mscale_all_dim=True,
            float32_rotation=True,
        ),
    ),
    constants={"mlp.normalize": False, "mlp.group_top_k": 1},
    parts={"mlp": MoE, "mlp.shared": MLP},
    rules=deepseek_v3.RULES,
    copies=(TIED_HEAD,),
)
