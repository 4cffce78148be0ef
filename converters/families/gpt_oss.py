"""gpt-oss: attention sinks, alternating windows, experts with biases."""

from dew.converters.config import transforms
from dew.converters.config.defaults import LayerTypes
from dew.converters.config.fields import Inert, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import Rule
from dew.nn.config import MLP, MoE

MOE, EXPERTS = shared.LAYER + "mlp.", "layers/{n}/mlp/experts/"
ODD, ODD_BIAS = "e embed (mlp |) -> e mlp embed", "e (mlp |) -> e mlp"
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""RoPE of a config that has no rope dict."""
FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.RMS,
    **shared.router_loss(),
    "vocab_size": Use("vocab", 201088),
    "hidden_size": Use("embed", 2880),
    "num_hidden_layers": Use("layers", 36),
    "num_attention_heads": Use("attention.heads", 64),
    "num_key_value_heads": Use("attention.kv_heads", 8),
    "head_dim": Use("attention.head_dim", 64),
    "intermediate_size": Use("mlp.dim", 2880),
    "rms_norm_eps": Use("norm.eps", 1e-5),
    "max_position_embeddings": Read(131072),
    "num_local_experts": Use("mlp.experts", 128),
    "num_experts_per_tok": Use("mlp.top_k", 4),
    "experts_per_token": Inert(),
    # The experts' gate is fixed.
    "hidden_act": Inert("silu"),
    "swiglu_alpha": Use("mlp.clamp.alpha", 1.702),
    "swiglu_limit": Use("mlp.clamp.limit", 7.0),
    "attention_bias": Use(("attention.qkv_bias", "attention.out_bias"), True),
    "sliding_window": Read(128),
    "layer_types": Use(
        "attention.windows",
        LayerTypes(2),
        read=transforms.windows,
        inputs=("sliding_window",),
    ),
}

GPT_OSS = Family(
    model_type="gpt_oss",
    architectures=("GptOssForCausalLM", "GptOssModel"),
    fields=FIELDS,
    aliases={"num_experts": "num_local_experts"},
    ropes=(RopeFields(theta=150_000.0, default=YARN),),
    constants={"attention.sinks": True, "mlp.router_bias": True, "mlp.bias": True},
    parts={"mlp": MoE, "mlp.shared": MLP},
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.BEFORE,
        Rule(shared.ATTN + "sinks", "layers/{n}/attn/sinks"),
        Rule(MOE + "router.{kind}", "layers/{n}/mlp/router/{kind}"),
        Rule(MOE + "experts.gate_up_proj", EXPERTS + "gate/weight", ODD),
        Rule(MOE + "experts.gate_up_proj", EXPERTS + "up/weight", ODD),
        Rule(MOE + "experts.gate_up_proj_bias", EXPERTS + "gate_bias", ODD_BIAS),
        Rule(MOE + "experts.gate_up_proj_bias", EXPERTS + "up_bias", ODD_BIAS),
        Rule(MOE + "experts.down_proj", EXPERTS + "down/weight", "e m d -> e d m"),
        Rule(MOE + "experts.down_proj_bias", EXPERTS + "down_bias"),
    ),
    copies=(TIED_HEAD,),
)
