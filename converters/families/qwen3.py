"""Qwen 3: Qwen 2 with QK norms in place of QKV biases."""

from dew.converters.config.fields import Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.RMS,
    **shared.LATE_WINDOWS,
    **shared.ATTENTION_BIAS,
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
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.GATED_MLP,
        *shared.QK_NORM,
        *shared.BEFORE,
    ),
    copies=(TIED_HEAD,),
)
