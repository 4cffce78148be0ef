"""Qwen 3 MoE: Qwen 3 with a mixture of experts."""

from dew.converters.config import transforms
from dew.converters.config.fields import Inert, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP, MoE

FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.RMS,
    **shared.router_loss(),
    **shared.ATTENTION_BIAS,
    **shared.DENSE_LAYERS,
    "vocab_size": Use("vocab", 151936),
    "hidden_size": Use("embed", 2048),
    "num_hidden_layers": Use("layers", 24),
    "num_key_value_heads": Use("attention.kv_heads", 4),
    "intermediate_size": Use("dense.dim", 6144),
    "hidden_act": Use(
        ("mlp.activation", "dense.activation"), "silu", choices=ACTIVATIONS
    ),
    "moe_intermediate_size": Use("mlp.dim", 768),
    "num_experts": Use("mlp.experts", 128),
    "num_experts_per_tok": Use("mlp.top_k", 8),
    "norm_topk_prob": Use("mlp.normalize", False),
    "rms_norm_eps": Use(("norm.eps", "attention.qk_norm.norm.eps"), 1e-6),
    "use_sliding_window": Read(False),
    "sliding_window": Use(
        "attention.windows",
        4096,
        read=transforms.same_window_if_used,
        inputs=("num_hidden_layers", "use_sliding_window"),
        nullable=True,
    ),
    # transformers has windows in all layers or none.
    "max_window_layers": Inert(),
}

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    fields=FIELDS,
    aliases={"num_local_experts": "num_experts"},
    ropes=(RopeFields(),),
    parts={"mlp": MoE, "mlp.shared": MLP},
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.QK_NORM,
        *shared.BEFORE,
        *shared.EXPERTS,
        *shared.DENSE,
    ),
    copies=(TIED_HEAD,),
)
