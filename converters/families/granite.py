"""Granite 3: Llama with a number before every sum."""

from dew.converters.config.fields import Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import inverse
from dew.converters.families import shared as parts
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **parts.SIZES,
    **parts.GROUPED,
    **parts.RMS,
    **parts.ATTENTION_BIAS,
    **parts.MLP_BIAS,
    "embedding_multiplier": Use("embedding.scale", 1.0),
    "attention_multiplier": Use("attention.scale", 1.0),
    "residual_multiplier": Use("residual.scale", 1.0),
    "logits_scaling": Use("head.scale", 1.0, read=inverse),
}

GRANITE = Family(
    model_type="granite",
    architectures=("GraniteForCausalLM", "GraniteModel"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    rules=(*parts.EMBED, *parts.ATTENTION, *parts.GATED_MLP, *parts.BEFORE),
    copies=(TIED_HEAD,),
    ignored=parts.IGNORED,
)
