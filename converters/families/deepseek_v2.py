"""DeepSeek V2: V3 with softmax scores, groups by their best expert, and no bias."""

from dew.converters.config import transforms as readers
from dew.converters.config.fields import MultiUse, Only, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import deepseek_v3
from dew.converters.families import shared as parts
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP, MoE

METHODS = (readers.GREEDY, readers.LIMITED)
FIELDS = {
    **deepseek_v3.FIELDS,
    "vocab_size": Use("vocab", 102400),
    "hidden_size": Use("embed", 4096),
    "num_hidden_layers": Use("layers", 32),
    "num_attention_heads": Use(("attention.heads", "attention.kv_heads"), 32),
    "intermediate_size": Use("dense.dim", 11008),
    "mlp_bias": Use(("dense.bias", "mlp.shared.bias"), False),
    "first_k_dense_replace": Use("dense_layers", 0, read=readers.first_layers),
    "n_routed_experts": Use("mlp.experts", 64),
    "num_experts_per_tok": Use("mlp.top_k", None, read=readers.stated),
    "moe_intermediate_size": Use("mlp.dim", 1407),
    "n_shared_experts": Use(
        "mlp.shared.dim", 2, read=readers.product, beside=("moe_intermediate_size",)
    ),
    "n_group": Read(None),
    "topk_group": Read(None),
    "topk_method": MultiUse(
        Use(
            "mlp.groups",
            readers.GREEDY,
            read=readers.limited,
            beside=("n_group",),
            among=METHODS,
        ),
        Use(
            "mlp.top_groups",
            readers.GREEDY,
            read=readers.limited,
            beside=("topk_group",),
            among=METHODS,
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
            head_dim="qk_rope_head_dim", interleaved=True, sharpens=True, wide=True
        ),
    ),
    constants={"mlp.normalize": False, "mlp.group_top_k": 1},
    parts={"mlp": MoE, "mlp.shared": MLP},
    rules=deepseek_v3.RULES,
    copies=(TIED_HEAD,),
    ignored=parts.IGNORED,
)
