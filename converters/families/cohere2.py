"""Command R7B: Command R with sliding windows and no RoPE on full layers."""

from dew.converters.config.defaults import LayerTypes
from dew.converters.config.fields import Inert, MultiUse, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import full_no_rope, windows
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

TYPES = LayerTypes("sliding_window_pattern")
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
    "sliding_window": Read(4096, nullable=True),
    "sliding_window_pattern": Read(4),
    "_sliding_window_pattern": Inert(4),
    "layer_types": MultiUse(
        Use("attention.windows", TYPES, read=windows, inputs=("sliding_window",)),
        Use("attention.no_rope_layers", TYPES, read=full_no_rope),
    ),
}

COHERE2 = Family(
    model_type="cohere2",
    architectures=("Cohere2ForCausalLM", "Cohere2Model"),
    fields=FIELDS,
    ropes=(RopeFields(interleaved=True),),
    parts={"mlp": MLP},
    constants={
        "norm.kind": "layer",
        "norm.float32_weight": True,
        "residual.parallel": True,
        "residual.shared": True,
    },
    rules=(*shared.EMBED, *shared.ATTENTION, *shared.GATED_MLP, *shared.BEFORE),
    copies=(TIED_HEAD,),
)
