"""Mistral 7B and relatives: Llama with one sliding window for all layers."""

from dew.converters.config.fields import Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import same_window
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.RMS,
    "num_key_value_heads": Use("attention.kv_heads", 8),
    "intermediate_size": Use("mlp.dim", 14336),
    "max_position_embeddings": Read(131072),
    "sliding_window": Use(
        "attention.windows",
        4096,
        read=same_window,
        inputs=("num_hidden_layers",),
        nullable=True,
    ),
}

MISTRAL = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    rules=(*shared.EMBED, *shared.ATTENTION, *shared.GATED_MLP, *shared.BEFORE),
    copies=(TIED_HEAD,),
)
