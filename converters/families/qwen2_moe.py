"""Qwen 1.5 and 2 MoE: Qwen 2 with experts and one gated shared expert."""

from dew.converters.config import transforms
from dew.converters.config.defaults import EarlyWindows
from dew.converters.config.fields import Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP, MoE

SHARED = shared.LAYER + "mlp.shared_expert"
FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.RMS,
    **shared.router_loss(),
    **shared.LATE_WINDOWS,
    **shared.DENSE_LAYERS,
    "vocab_size": Use("vocab", 151936),
    "hidden_size": Use("embed", 2048),
    "num_hidden_layers": Use("layers", 24),
    "num_attention_heads": Use("attention.heads", 16),
    "hidden_act": Use(
        ("mlp.activation", "mlp.shared.activation", "dense.activation"),
        "silu",
        choices=ACTIVATIONS,
    ),
    "layer_types": Use(
        "attention.windows",
        EarlyWindows(),
        read=transforms.windows_if_used,
        inputs=("sliding_window", "use_sliding_window"),
    ),
    "moe_intermediate_size": Use("mlp.dim", 1408),
    "shared_expert_intermediate_size": Use("mlp.shared.dim", 5632),
    "num_experts": Use("mlp.experts", 60),
    "num_experts_per_tok": Use("mlp.top_k", 4),
    "norm_topk_prob": Use("mlp.normalize", False),
    "qkv_bias": Use("attention.qkv_bias", True),
}

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    constants={"mlp.shared_gate": True},
    parts={"mlp": MoE, "mlp.shared": MLP},
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.BEFORE,
        *shared.EXPERTS,
        *shared.DENSE,
        Rule(SHARED + ".{x}_proj.weight", "layers/{n}/mlp/shared/{x}/weight"),
        Rule(SHARED + "_gate.weight", "layers/{n}/mlp/open/weight"),
    ),
    copies=(TIED_HEAD,),
)
