"""Mistral 7B and its like: Llama with one window for all layers."""

from dew.converters.config.fields import Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import same_window
from dew.converters.families import shared as parts
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **parts.SIZES,
    **parts.GROUPED,
    **parts.RMS,
    "num_key_value_heads": Use("attention.kv_heads", 8),
    "intermediate_size": Use("mlp.dim", 14336),
    "max_position_embeddings": Read(131072),
    "sliding_window": Use(
        "attention.windows",
        4096,
        read=same_window,
        beside=("num_hidden_layers",),
        nullable=True,
    ),
}

MISTRAL = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    rules=(*parts.EMBED, *parts.ATTENTION, *parts.GATED_MLP, *parts.BEFORE),
    copies=(TIED_HEAD,),
    ignored=parts.IGNORED,
)
