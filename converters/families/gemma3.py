"""Gemma 3 (text): Gemma 2 with QK norms in place of soft caps."""

import math

from dew.converters.config.defaults import LayerTypes
from dew.converters.config.fields import Inert, MultiUse, Only, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import windows
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import Prefix
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.ATTENTION_BIAS,
    "vocab_size": Use("vocab", 262208),
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
    "rms_norm_eps": Use(("norm.eps", "attention.qk_norm.norm.eps"), 1e-6),
    "hidden_activation": Use(
        "mlp.activation", "gelu_pytorch_tanh", choices=ACTIVATIONS
    ),
    # transformers does not read it here.
    "hidden_act": Inert(),
    "max_position_embeddings": Read(131072),
    "query_pre_attn_scalar": Use(
        "attention.scale", 256, read=lambda scalar: scalar**-0.5
    ),
    "attn_logit_softcapping": Use("attention.softcap", None),
    "final_logit_softcapping": Use("head.softcap", None),
    "sliding_window": Read(4096, nullable=True),
    "layer_types": Use(
        "attention.windows",
        LayerTypes("sliding_window_pattern"),
        read=windows,
        inputs=("sliding_window",),
    ),
    "sliding_window_pattern": Read(6),
    "_sliding_window_pattern": Inert(6),
    # Part of old cache implementations.
    "cache_implementation": Inert(),
}

GEMMA3 = Family(
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    fields=FIELDS,
    ropes=(
        RopeFields(theta=1_000_000.0, layer_type="full_attention"),
        RopeFields(
            to="attention.local_rope",
            layer_type="sliding_attention",
            takes_rope_scaling=False,
            old_theta="rope_local_base_freq",
        ),
    ),
    spellings=(
        Prefix(body="model."),
        Prefix(body="language_model.model.", rest="language_model."),
        Prefix(body=""),
    ),
    parts={"mlp": MLP},
    constants={
        "norm.offset": 1.0,
        "norm.float32_weight": True,
        "residual.norms": "both",
        "attention.qk_norm.norm.offset": 1.0,
        "attention.qk_norm.norm.float32_weight": True,
    },
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.GATED_MLP,
        *shared.AROUND,
        *shared.QK_NORM,
    ),
    copies=(TIED_HEAD,),
)
