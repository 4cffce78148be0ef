"""StableLM 2: LayerNorm, partial RoPE, optional parallel residual."""

from dew.converters.config.fields import Inert, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import layer_qk_norm_each
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import Rule
from dew.nn.config import MLP

Q_NORM, K_NORM = "layers/{n}/attn/q_norm/weight", "layers/{n}/attn/k_norm/weight"
FIELDS = {
    **shared.SIZES,
    **shared.LAYER_NORM,
    "vocab_size": Use("vocab", 50304),
    "hidden_size": Use("embed", 2560),
    "intermediate_size": Use("mlp.dim", 6912),
    "num_key_value_heads": Use("attention.kv_heads", 32),
    "max_position_embeddings": Read(4096),
    "use_qkv_bias": Use("attention.qkv_bias", False),
    "qk_layernorm": Use(
        "attention.qk_norm",
        False,
        read=layer_qk_norm_each,
        inputs=("layer_norm_eps",),
    ),
    "use_parallel_residual": Use(("residual.parallel", "residual.shared"), False),
    # A training option: it changes no logit.
    "hidden_dropout": Inert(0.0),
}

STABLELM = Family(
    model_type="stablelm",
    architectures=("StableLmForCausalLM", "StableLmModel"),
    fields=FIELDS,
    ropes=(RopeFields(partial=True, fraction=0.25),),
    parts={"mlp": MLP},
    constants={"norm.kind": "layer", "norm.bias": True},
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.GATED_MLP,
        *shared.BEFORE,
        Rule(shared.ATTN + "q_layernorm.norms.{h}.weight", Q_NORM, "dim -> h dim"),
        Rule(shared.ATTN + "k_layernorm.norms.{h}.weight", K_NORM, "dim -> h dim"),
    ),
    copies=(TIED_HEAD,),
)
