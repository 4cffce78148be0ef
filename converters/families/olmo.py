"""OLMo 1: Llama with LayerNorm that has no learned weights."""

from dew.converters.config.fields import Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.ATTENTION_BIAS,
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
    rules=(*shared.EMBED, *shared.ATTENTION, *shared.GATED_MLP, *shared.BEFORE),
    copies=(TIED_HEAD,),
)
