"""OLMo 3: OLMo 2 with windows, whose layers turn by a rope of their own."""

from dew.converters.config.defaults import LayerTypes
from dew.converters.config.fields import Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import windows
from dew.converters.families import shared as parts
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **parts.SIZES,
    **parts.GROUPED,
    **parts.ATTENTION_BIAS,
    "vocab_size": Use("vocab", 50304),
    "rms_norm_eps": Use(("norm.eps", "attention.qk_norm.norm.eps"), 1e-5),
    "sliding_window": Read(4096, nullable=True),
    "layer_types": Use(
        "attention.windows", LayerTypes(4), read=windows, beside=("sliding_window",)
    ),
}

OLMO3 = Family(
    model_type="olmo3",
    architectures=("Olmo3ForCausalLM", "Olmo3Model"),
    fields=FIELDS,
    ropes=(
        RopeFields(theta=500_000.0, layer_type="full_attention"),
        # Its theta is no field of version 4: rope_theta is the other's alone.
        RopeFields(
            to="attention.local_rope",
            theta=500_000.0,
            layer_type="sliding_attention",
            scaled=False,
            old_theta=None,
        ),
    ),
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
