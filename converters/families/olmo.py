"""OLMo 1: Llama with layer norms that learn nothing."""

from dew.converters.config.fields import Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared as parts
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **parts.SIZES,
    **parts.GROUPED,
    **parts.ATTENTION_BIAS,
    "vocab_size": Use("vocab", 50304),
    "clip_qkv": Use("attention.clip", None),
}

OLMO = Family(
    model_type="olmo",
    architectures=("OlmoForCausalLM", "OlmoModel"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    constants={"norm.kind": "layer", "norm.eps": 1e-5, "norm.scaled": False},
    rules=(*parts.EMBED, *parts.ATTENTION, *parts.GATED_MLP, *parts.BEFORE),
    copies=(TIED_HEAD,),
    ignored=parts.IGNORED,
)
