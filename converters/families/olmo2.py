"""OLMo 2: norms after attention and MLP, and of queries and keys."""

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
        *parts.EMBED,
        *parts.ATTENTION,
        *parts.GATED_MLP,
        *parts.QK_NORM,
        *parts.AFTER,
    ),
    copies=(TIED_HEAD,),
    ignored=parts.IGNORED,
)
