"""Granite 3 MoE: Granite 3 with experts, stored as fused tensors."""

from dew.converters.config.fields import Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import Rule
from dew.nn.config import MLP, MoE

MOE, EXPERTS = shared.LAYER + "block_sparse_moe.", "layers/{n}/mlp/experts/"
HALF = "e (| mlp) embed -> e mlp embed"
FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.RMS,
    **shared.router_loss(),
    **shared.ATTENTION_BIAS,
    "num_local_experts": Use("mlp.experts", 8),
    "num_experts_per_tok": Use("mlp.top_k", 2),
    "embedding_multiplier": Use("embedding.scale", 1.0),
    "attention_multiplier": Use("attention.scale", 1.0),
    "residual_multiplier": Use("residual.scale", 1.0),
    "logits_scaling": Use("head.scale", 1.0, read=lambda divisor: 1 / divisor),
}

GRANITEMOE = Family(
    model_type="granitemoe",
    architectures=("GraniteMoeForCausalLM", "GraniteMoeModel"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MoE, "mlp.shared": MLP},
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.BEFORE,
        Rule(MOE + "router.layer.weight", "layers/{n}/mlp/router/weight"),
        Rule(MOE + "input_linear.weight", EXPERTS + "gate/weight", HALF),
        Rule(MOE + "input_linear.weight", EXPERTS + "up/weight", HALF),
        Rule(MOE + "output_linear.weight", EXPERTS + "down/weight"),
    ),
    copies=(TIED_HEAD,),
)
