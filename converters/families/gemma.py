"""Gemma 1: norms multiply by 1 + w, embeddings are scaled by √width."""

import math

from dew.converters.config.fields import Inert, MultiUse, Only, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.ATTENTION_BIAS,
    "vocab_size": Use("vocab", 256000),
    "hidden_size": MultiUse(
        Use("embed", 3072), Use("embedding.scale", 3072, read=math.sqrt)
    ),
    "tie_word_embeddings": Use("head.tied", True),
    "head_dim": Use("attention.head_dim", 256),
    "use_bidirectional_attention": Only(None, False),
    "num_hidden_layers": Use("layers", 28),
    "num_attention_heads": Use("attention.heads", 16),
    "num_key_value_heads": Use("attention.kv_heads", 16),
    "intermediate_size": Use("mlp.dim", 24576),
    "rms_norm_eps": Use("norm.eps", 1e-6),
    # The first releases said gelu and meant its tanh form, which transformers takes.
    "hidden_act": Use(
        "mlp.activation",
        "gelu_pytorch_tanh",
        read=lambda name: "gelu_pytorch_tanh" if name == "gelu" else name,
        choices=ACTIVATIONS,
    ),
    # transformers does not read it here.
    "hidden_activation": Inert(),
    "max_position_embeddings": Read(8192),
}

GEMMA = Family(
    model_type="gemma",
    architectures=("GemmaForCausalLM", "GemmaModel"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    constants={"norm.offset": 1.0, "norm.float32_weight": True},
    rules=(*shared.EMBED, *shared.ATTENTION, *shared.GATED_MLP, *shared.BEFORE),
    copies=(TIED_HEAD,),
)
