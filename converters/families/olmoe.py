"""OLMoE: Llama with a mixture of experts and flat QK norms."""

from dew.converters.config.fields import Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP, MoE

FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.RMS,
    **shared.router_loss(0.01),
    **shared.ATTENTION_BIAS,
    "vocab_size": Use("vocab", 50304),
    "intermediate_size": Use("mlp.dim", 2048),
    "num_experts": Use("mlp.experts", 64),
    "num_experts_per_tok": Use("mlp.top_k", 8),
    "norm_topk_prob": Use("mlp.normalize", False),
    "hidden_size": Use("embed", 2048),
    "num_hidden_layers": Use("layers", 16),
    "num_attention_heads": Use("attention.heads", 16),
    "rms_norm_eps": Use(("norm.eps", "attention.qk_norm.norm.eps"), 1e-5),
    "clip_qkv": Use("attention.clip", None),
}

OLMOE = Family(
    model_type="olmoe",
    architectures=("OlmoeForCausalLM", "OlmoeModel"),
    fields=FIELDS,
    aliases={"num_local_experts": "num_experts"},
    ropes=(RopeFields(),),
    constants={"attention.qk_norm.shared_by": "flat"},
    parts={"mlp": MoE, "mlp.shared": MLP},
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.QK_NORM,
        *shared.BEFORE,
        *shared.EXPERTS,
    ),
    copies=(TIED_HEAD,),
)
