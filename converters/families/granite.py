"""Granite 3: Llama with scaled embeddings, attention, residuals and logits."""

from dew.converters.config.fields import Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.RMS,
    **shared.ATTENTION_BIAS,
    **shared.MLP_BIAS,
    "embedding_multiplier": Use("embedding.scale", 1.0),
    "attention_multiplier": Use("attention.scale", 1.0),
    "residual_multiplier": Use("residual.scale", 1.0),
    "logits_scaling": Use("head.scale", 1.0, read=lambda divisor: 1 / divisor),
}

GRANITE = Family(
    model_type="granite",
    architectures=("GraniteForCausalLM", "GraniteModel"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    rules=(*shared.EMBED, *shared.ATTENTION, *shared.GATED_MLP, *shared.BEFORE),
    copies=(TIED_HEAD,),
)
