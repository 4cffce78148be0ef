"""Gemma 2: Gemma with post-norms, capped logits and alternating windows."""

import math

from dew.converters.config.defaults import LayerTypes
from dew.converters.config.fields import Inert, MultiUse, Only, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import windows
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.ATTENTION_BIAS,
    "vocab_size": Use("vocab", 256000),
    "hidden_size": MultiUse(
        Use("embed", 2304), Use("embedding.scale", 2304, read=math.sqrt)
    ),
    "tie_word_embeddings": Use("head.tied", True),
    "head_dim": Use("attention.head_dim", 256),
    "use_bidirectional_attention": Only(None, False),
    "num_hidden_layers": Use("layers", 26),
    "num_attention_heads": Use("attention.heads", 8),
    "num_key_value_heads": Use("attention.kv_heads", 4),
    "intermediate_size": Use("mlp.dim", 9216),
    "rms_norm_eps": Use("norm.eps", 1e-6),
    "hidden_activation": Use(
        "mlp.activation", "gelu_pytorch_tanh", choices=ACTIVATIONS
    ),
    # transformers does not read it here.
    "hidden_act": Inert(),
    "max_position_embeddings": Read(8192),
    "query_pre_attn_scalar": Use(
        "attention.scale", 256, read=lambda scalar: scalar**-0.5
    ),
    "attn_logit_softcapping": Use("attention.softcap", 50.0, nullable=True),
    "final_logit_softcapping": Use("head.softcap", 30.0, nullable=True),
    "sliding_window": Read(4096, nullable=True),
    "layer_types": Use(
        "attention.windows", LayerTypes(2), read=windows, inputs=("sliding_window",)
    ),
    # Part of old cache implementations.
    "cache_implementation": Inert(),
}

GEMMA2 = Family(
    model_type="gemma2",
    architectures=("Gemma2ForCausalLM", "Gemma2Model"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    constants={
        "norm.offset": 1.0,
        "norm.float32_weight": True,
        "residual.norms": "both",
    },
    rules=(*shared.EMBED, *shared.ATTENTION, *shared.GATED_MLP, *shared.AROUND),
    copies=(TIED_HEAD,),
)
