"""GLM 4: pre- and post-norms, interleaved RoPE on half of each head."""

from dew.converters.config.fields import Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import Rule
from dew.nn.config import MLP

NORM = "layers/{n}/"
FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    "vocab_size": Use("vocab", 151552),
    "num_hidden_layers": Use("layers", 40),
    "num_key_value_heads": Use("attention.kv_heads", 2),
    "head_dim": Use("attention.head_dim", 128),
    "intermediate_size": Use("mlp.dim", 13696),
    "rms_norm_eps": Use("norm.eps", 1.5625e-07),
    "max_position_embeddings": Read(131072),
    "attention_bias": Use("attention.qkv_bias", True),
}

GLM4 = Family(
    model_type="glm4",
    architectures=("Glm4ForCausalLM", "Glm4Model"),
    fields=FIELDS,
    ropes=(RopeFields(partial=True, fraction=0.5, interleaved=True),),
    parts={"mlp": MLP},
    constants={"residual.norms": "both"},
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.FUSED_GATE,
        Rule(shared.LAYER + "input_layernorm.weight", NORM + "attn_norm/weight"),
        Rule(
            shared.LAYER + "post_self_attn_layernorm.weight",
            NORM + "attn_post_norm/weight",
        ),
        Rule(
            shared.LAYER + "post_attention_layernorm.weight", NORM + "mlp_norm/weight"
        ),
        Rule(shared.LAYER + "post_mlp_layernorm.weight", NORM + "mlp_post_norm/weight"),
    ),
    copies=(TIED_HEAD,),
)
