"""Qwen 3 with experts."""

from dew.converters.config import transforms as readers
from dew.converters.config.fields import Inert, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared as parts
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP, MoE

FIELDS = {
    **parts.SIZES,
    **parts.GROUPED,
    **parts.RMS,
    **parts.ROUTER_LOSS,
    **parts.ATTENTION_BIAS,
    **parts.DENSE_LAYERS,
    "vocab_size": Use("vocab", 151936),
    "hidden_size": Use("embed", 2048),
    "num_hidden_layers": Use("layers", 24),
    "num_key_value_heads": Use("attention.kv_heads", 4),
    "intermediate_size": Use("dense.dim", 6144),
    "hidden_act": Use(
        ("mlp.activation", "dense.activation"), "silu", among=ACTIVATIONS
    ),
    "moe_intermediate_size": Use("mlp.dim", 768),
    "num_local_experts": Use("mlp.experts", 128),
    "num_experts_per_tok": Use("mlp.top_k", 8),
    "norm_topk_prob": Use("mlp.normalize", False),
    "rms_norm_eps": Use(("norm.eps", "attention.qk_norm.norm.eps"), 1e-6),
    "use_sliding_window": Read(False),
    "sliding_window": Use(
        "attention.windows",
        4096,
        read=readers.used_window,
        beside=("num_hidden_layers", "use_sliding_window"),
        nullable=True,
    ),
    # transformers has windows in all layers or none.
    "max_window_layers": Inert(),
}

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    fields=FIELDS,
    aliases={"num_experts": "num_local_experts"},
    ropes=(RopeFields(),),
    parts={"mlp": MoE, "mlp.shared": MLP},
    rules=(
        *parts.EMBED,
        *parts.ATTENTION,
        *parts.QK_NORM,
        *parts.BEFORE,
        *parts.EXPERTS,
        *parts.DENSE,
    ),
    copies=(TIED_HEAD,),
    ignored=parts.IGNORED,
)
