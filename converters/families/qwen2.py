"""Qwen 2 and 2.5: biases on queries, keys and values; windows in late layers."""

from dew.converters.config.fields import Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared as parts
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **parts.SIZES,
    **parts.GROUPED,
    **parts.RMS,
    **parts.LATE_WINDOWS,
    "vocab_size": Use("vocab", 151936),
    "num_key_value_heads": Use("attention.kv_heads", 32),
    "intermediate_size": Use("mlp.dim", 22016),
    "max_position_embeddings": Read(32768),
}

QWEN2 = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    constants={"attention.qkv_bias": True},
    rules=(*parts.EMBED, *parts.ATTENTION, *parts.GATED_MLP, *parts.BEFORE),
    copies=(TIED_HEAD,),
    ignored=parts.IGNORED,
)
