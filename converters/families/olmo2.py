"""OLMo 2: Llama with post-norms and flat QK norms."""

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
    "rms_norm_eps": Use(("norm.eps", "attention.qk_norm.norm.eps"), 1e-5),
}

OLMO2 = Family(
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    constants={
        "norm.float32_weight": True,
        "attention.qk_norm.norm.float32_weight": True,
        "attention.qk_norm.shared_by": "flat",
        "residual.norms": "after",
    },
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.GATED_MLP,
        *shared.QK_NORM,
        *shared.AFTER,
    ),
    copies=(TIED_HEAD,),
)
