"""Mixtral: Mistral with a mixture of experts in every layer."""

from dew.converters.config import transforms
from dew.converters.config.fields import Inert, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import Rule
from dew.nn.config import MLP, MoE

MOE, EXPERTS = shared.LAYER + "block_sparse_moe.", "layers/{n}/mlp/experts/"
STACK = "a b -> e a b"
FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.RMS,
    **shared.router_loss(),
    "num_key_value_heads": Use("attention.kv_heads", 8),
    "intermediate_size": Use("mlp.dim", 14336),
    "rms_norm_eps": Use("norm.eps", 1e-5),
    "num_local_experts": Use("mlp.experts", 8),
    "num_experts_per_tok": Use("mlp.top_k", 2),
    # A training option: it changes no logit.
    "router_jitter_noise": Inert(0.0),
    "sliding_window": Use(
        "attention.windows",
        None,
        read=transforms.same_window,
        inputs=("num_hidden_layers",),
    ),
}

MIXTRAL = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel"),
    fields=FIELDS,
    aliases={"num_experts": "num_local_experts"},
    ropes=(RopeFields(theta=1_000_000.0),),
    parts={"mlp": MoE, "mlp.shared": MLP},
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.BEFORE,
        Rule(MOE + "gate.weight", "layers/{n}/mlp/router/weight"),
        Rule(MOE + "experts.{e}.w1.weight", EXPERTS + "gate/weight", STACK),
        Rule(MOE + "experts.{e}.w3.weight", EXPERTS + "up/weight", STACK),
        Rule(MOE + "experts.{e}.w2.weight", EXPERTS + "down/weight", STACK),
    ),
    copies=(TIED_HEAD,),
)
