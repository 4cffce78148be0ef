"""OLMo 3: OLMo 2 with sliding windows, whose layers have their own RoPE."""

from dew.converters.config.defaults import LayerTypes
from dew.converters.config.fields import Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import windows
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.ATTENTION_BIAS,
    "vocab_size": Use("vocab", 50304),
    "rms_norm_eps": Use(("norm.eps", "attention.qk_norm.norm.eps"), 1e-5),
    "sliding_window": Read(4096, nullable=True),
    "layer_types": Use(
        "attention.windows", LayerTypes(4), read=windows, inputs=("sliding_window",)
    ),
}

OLMO3 = Family(
    model_type="olmo3",
    architectures=("Olmo3ForCausalLM", "Olmo3Model"),
    fields=FIELDS,
    ropes=(
        RopeFields(theta=500_000.0, layer_type="full_attention"),
        # No version 4 field states its theta: rope_theta is that of the full layers.
        RopeFields(
            to="attention.local_rope",
            theta=500_000.0,
            layer_type="sliding_attention",
            takes_rope_scaling=False,
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
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.GATED_MLP,
        *shared.QK_NORM,
        *shared.AFTER,
    ),
    copies=(TIED_HEAD,),
)
