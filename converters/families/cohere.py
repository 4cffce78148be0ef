"""Command R: parallel attention and MLP, interleaved RoPE, scaled logits."""

from dew.converters.config.fields import Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import layer_qk_norm_each
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.LAYER_NORM,
    **shared.ATTENTION_BIAS,
    "vocab_size": Use("vocab", 256000),
    "hidden_size": Use("embed", 8192),
    "num_hidden_layers": Use("layers", 40),
    "num_attention_heads": Use("attention.heads", 64),
    "intermediate_size": Use("mlp.dim", 22528),
    "tie_word_embeddings": Use("head.tied", True),
    "max_position_embeddings": Read(8192),
    "logit_scale": Use("head.scale", 0.0625),
    "use_qk_norm": Use(
        "attention.qk_norm",
        False,
        read=layer_qk_norm_each,
        inputs=("layer_norm_eps",),
    ),
}

COHERE = Family(
    model_type="cohere",
    architectures=("CohereForCausalLM", "CohereModel"),
    fields=FIELDS,
    ropes=(RopeFields(theta=500_000.0, interleaved=True),),
    parts={"mlp": MLP},
    constants={
        "norm.kind": "layer",
        "norm.float32_weight": True,
        "residual.parallel": True,
        "residual.shared": True,
    },
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.GATED_MLP,
        *shared.QK_NORM,
        *shared.BEFORE,
    ),
    copies=(TIED_HEAD,),
)
