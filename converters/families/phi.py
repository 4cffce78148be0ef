"""Phi 1 and 2: parallel parts behind one LayerNorm, RoPE on half of a head."""

from dew.converters.config import transforms
from dew.converters.config.fields import Inert, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import FROM_HEADS, Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    **shared.LAYER_NORM,
    "vocab_size": Use("vocab", 51200),
    "hidden_size": Use("embed", 2048),
    "num_hidden_layers": Use("layers", 24),
    "intermediate_size": Use("mlp.dim", 8192),
    "hidden_act": Use("mlp.activation", "gelu_new", choices=ACTIVATIONS),
    "qk_layernorm": Use(
        "attention.qk_norm",
        False,
        read=transforms.layer_qk_norm,
        inputs=("layer_norm_eps",),
    ),
    # Dropout rates: they change no logit.
    "resid_pdrop": Inert(0.0),
    "embd_pdrop": Inert(0.0),
}

LAYER, ATTN = shared.LAYER, shared.ATTN
RULES = (
    Rule("model.embed_tokens.weight", "embed/weight"),
    *shared.QKV,
    Rule(ATTN + "dense.weight", "layers/{n}/attn/o/weight", FROM_HEADS),
    Rule(ATTN + "dense.bias", "layers/{n}/attn/o/bias"),
    Rule(ATTN + "q_layernorm.{kind}", "layers/{n}/attn/q_norm/{kind}"),
    Rule(ATTN + "k_layernorm.{kind}", "layers/{n}/attn/k_norm/{kind}"),
    Rule(LAYER + "mlp.fc1.{kind}", "layers/{n}/mlp/up/{kind}"),
    Rule(LAYER + "mlp.fc2.{kind}", "layers/{n}/mlp/down/{kind}"),
    Rule(LAYER + "input_layernorm.{kind}", "layers/{n}/attn_norm/{kind}"),
    Rule("model.final_layernorm.{kind}", "norm/{kind}"),
    Rule("lm_head.{kind}", "head/{kind}"),
)

PHI = Family(
    model_type="phi",
    architectures=("PhiForCausalLM", "PhiModel"),
    fields=FIELDS,
    ropes=(RopeFields(partial=True, fraction=0.5),),
    constants={
        "norm.kind": "layer",
        "norm.bias": True,
        "residual.parallel": True,
        "residual.shared": True,
        "attention.qkv_bias": True,
        "attention.out_bias": True,
        "mlp.bias": True,
        "mlp.gated": False,
        "head.bias": True,
    },
    parts={"mlp": MLP},
    rules=RULES,
    copies=(TIED_HEAD,),
)
