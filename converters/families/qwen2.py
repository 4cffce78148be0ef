"""Qwen 2 and 2.5: Llama with QKV biases and windows in late layers."""

from dew.converters.config.fields import Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.RMS,
    **shared.LATE_WINDOWS,
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
    rules=(*shared.EMBED, *shared.ATTENTION, *shared.GATED_MLP, *shared.BEFORE),
    copies=(TIED_HEAD,),
)
