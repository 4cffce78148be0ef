"""Qwen 3: norms of queries and keys, no biases."""

from dew.converters.config.fields import Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared as parts
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **parts.SIZES,
    **parts.RMS,
    **parts.LATE_WINDOWS,
    **parts.ATTENTION_BIAS,
    "rms_norm_eps": Use(("norm.eps", "attention.qk_norm.norm.eps"), 1e-6),
    "vocab_size": Use("vocab", 151936),
    "num_key_value_heads": Use("attention.kv_heads", 32),
    "head_dim": Use("attention.head_dim", 128),
    "intermediate_size": Use("mlp.dim", 22016),
    "max_position_embeddings": Read(32768),
}

QWEN3 = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    rules=(
        *parts.EMBED,
        *parts.ATTENTION,
        *parts.GATED_MLP,
        *parts.QK_NORM,
        *parts.BEFORE,
    ),
    copies=(TIED_HEAD,),
    ignored=parts.IGNORED,
)
