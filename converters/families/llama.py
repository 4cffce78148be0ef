"""Llama 1, 2 and 3, and models of the same shape (SmolLM2, Yi, TinyLlama)."""

from dew.converters.config.fields import Inert
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
    "pretraining_tp": Inert(1),
    "rope_interleaved": Inert(False),
}

LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    rules=(*shared.EMBED, *shared.ATTENTION, *shared.GATED_MLP, *shared.BEFORE),
    copies=(TIED_HEAD,),
)
