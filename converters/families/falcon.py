"""Falcon 7B, 40B and 180B: fused QKV, parallel attention and MLP.

Models with ALiBi are refused: torch rounds their biases to bfloat16.
"""

from dew.converters.config import transforms
from dew.converters.config.fields import Inert, Only, Quotient, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import FROM_HEADS, Prefix, Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP

FIELDS = {
    "vocab_size": Use("vocab", 65024),
    "hidden_size": Use("embed", 4544),
    "num_hidden_layers": Use("layers", 32),
    "num_attention_heads": Use("attention.heads", 71),
    "head_dim": Use(
        "attention.head_dim", Quotient("hidden_size", "num_attention_heads")
    ),
    "num_kv_heads": Use(
        "attention.kv_heads",
        None,
        read=transforms.falcon_kv_heads,
        inputs=("num_attention_heads", "new_decoder_architecture", "multi_query"),
    ),
    "multi_query": Read(True),
    "new_decoder_architecture": Read(False),
    "num_ln_in_parallel_attn": Read(None),
    "parallel_attn": Use(
        "residual",
        True,
        read=transforms.falcon_residual,
        inputs=("new_decoder_architecture", "num_ln_in_parallel_attn"),
    ),
    "ffn_hidden_size": Use(
        "mlp.dim", None, read=transforms.mlp_width, inputs=("hidden_size",)
    ),
    "activation": Use("mlp.activation", "gelu", choices=ACTIVATIONS),
    "bias": Use(("attention.qkv_bias", "attention.out_bias", "mlp.bias"), False),
    "alibi": Only(False),
    "layer_norm_epsilon": Use("norm.eps", 1e-5),
    "initializer_range": Use("init_std", 0.02),
    "max_position_embeddings": Read(2048),
    "attention_dropout": Use("attention.dropout", 0.0),
    # A training option: it changes no logit.
    "hidden_dropout": Inert(0.0),
    "tie_word_embeddings": Use("head.tied", True),
}

LAYER = "transformer.h.{n}."
QKV = LAYER + "self_attention.query_key_value."
Q, Q_BIAS = "(kv | g dim) embed -> (kv g) dim embed", "(kv | g dim) -> (kv g) dim"
KV, KV_BIAS = "(kv | dim) embed -> kv dim embed", "(kv | dim) -> kv dim"
RULES = (
    Rule("transformer.word_embeddings.weight", "embed/weight"),
    Rule(QKV + "weight", "layers/{n}/attn/q/weight", Q),
    Rule(QKV + "weight", "layers/{n}/attn/k/weight", KV),
    Rule(QKV + "weight", "layers/{n}/attn/v/weight", KV),
    Rule(QKV + "bias", "layers/{n}/attn/q/bias", Q_BIAS),
    Rule(QKV + "bias", "layers/{n}/attn/k/bias", KV_BIAS),
    Rule(QKV + "bias", "layers/{n}/attn/v/bias", KV_BIAS),
    Rule(LAYER + "self_attention.dense.weight", "layers/{n}/attn/o/weight", FROM_HEADS),
    Rule(LAYER + "self_attention.dense.bias", "layers/{n}/attn/o/bias"),
    Rule(LAYER + "mlp.dense_h_to_4h.{kind}", "layers/{n}/mlp/up/{kind}"),
    Rule(LAYER + "mlp.dense_4h_to_h.{kind}", "layers/{n}/mlp/down/{kind}"),
    Rule(LAYER + "input_layernorm.{kind}", "layers/{n}/attn_norm/{kind}"),
    Rule(LAYER + "post_attention_layernorm.{kind}", "layers/{n}/mlp_norm/{kind}"),
    Rule("transformer.ln_f.{kind}", "norm/{kind}"),
    Rule("lm_head.weight", "head/weight"),
)
TWO_NORMS = (("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp"))

FALCON = Family(
    model_type="falcon",
    architectures=("FalconForCausalLM", "FalconModel"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    aliases={"n_embed": "hidden_size"},
    constants={"norm.kind": "layer", "norm.bias": True, "mlp.gated": False},
    parts={"mlp": MLP},
    rules=RULES,
    copies=(TIED_HEAD,),
    prefix="transformer.",
    spellings=(
        Prefix(body="transformer."),
        Prefix(body="transformer.", names=TWO_NORMS),
        Prefix(body=""),
        Prefix(body="", names=TWO_NORMS),
    ),
)
