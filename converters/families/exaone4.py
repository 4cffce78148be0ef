"""EXAONE 4: OLMo 2 with QK norms per head; full layers have no RoPE."""

from dew.converters.config.defaults import LayerTypes
from dew.converters.config.fields import MultiUse, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import hybrid_no_rope, windows
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

TYPES = LayerTypes("sliding_window_pattern")
FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    "vocab_size": Use("vocab", 102400),
    "num_key_value_heads": Use("attention.kv_heads", 32),
    "intermediate_size": Use("mlp.dim", 16384),
    "rms_norm_eps": Use(("norm.eps", "attention.qk_norm.norm.eps"), 1e-5),
    "sliding_window": Read(4096, nullable=True),
    "sliding_window_pattern": Read(4, nullable=True, is_text_too=True),
    "layer_types": MultiUse(
        Use("attention.windows", TYPES, read=windows, inputs=("sliding_window",)),
        Use(
            "attention.no_rope_layers",
            TYPES,
            read=hybrid_no_rope,
            inputs=("sliding_window",),
        ),
    ),
}

EXAONE4 = Family(
    model_type="exaone4",
    architectures=("Exaone4ForCausalLM", "Exaone4Model"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    constants={"residual.norms": "after"},
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.GATED_MLP,
        *shared.QK_NORM,
        *shared.AFTER,
    ),
    copies=(TIED_HEAD,),
)
