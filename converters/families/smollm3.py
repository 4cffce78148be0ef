"""SmolLM3: Llama with no RoPE in every fourth layer."""

from dew.converters.config.defaults import NoRopeWindows, RopeLayers
from dew.converters.config.fields import Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import no_rope_layers, windows
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.RMS,
    **shared.ATTENTION_BIAS,
    **shared.MLP_BIAS,
    "vocab_size": Use("vocab", 128256),
    "hidden_size": Use("embed", 2048),
    "num_hidden_layers": Use("layers", 36),
    "num_attention_heads": Use("attention.heads", 16),
    "num_key_value_heads": Use("attention.kv_heads", 4),
    "max_position_embeddings": Read(32768),
    "tie_word_embeddings": Use("head.tied", True),
    "no_rope_layer_interval": Read(4),
    "no_rope_layers": Use(
        "attention.no_rope_layers",
        RopeLayers("no_rope_layer_interval"),
        read=no_rope_layers,
    ),
    "use_sliding_window": Read(False),
    "sliding_window": Read(None),
    "layer_types": Use(
        "attention.windows",
        NoRopeWindows("no_rope_layers"),
        read=windows,
        inputs=("sliding_window",),
    ),
}

SMOLLM3 = Family(
    model_type="smollm3",
    architectures=("SmolLM3ForCausalLM", "SmolLM3Model"),
    fields=FIELDS,
    ropes=(RopeFields(theta=2_000_000.0),),
    parts={"mlp": MLP},
    rules=(*shared.EMBED, *shared.ATTENTION, *shared.GATED_MLP, *shared.BEFORE),
    copies=(TIED_HEAD,),
)
