"""BLOOM: decoder with ALiBi position biases and a norm after the embedding."""

from dew.converters.config.fields import Inert, MultiUse, Only, Quotient, Use
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import FROM_HEADS, Prefix, Rule
from dew.nn.config import MLP

FIELDS = {
    "vocab_size": Use("vocab", 250880),
    "hidden_size": MultiUse(
        Use("embed", 64), Use("mlp.dim", 64, read=lambda width: 4 * width)
    ),
    "n_layer": Use("layers", 2),
    "n_head": Use(("attention.heads", "attention.kv_heads"), 8),
    "head_dim": Use("attention.head_dim", Quotient("hidden_size", "n_head")),
    "layer_norm_epsilon": Use(("norm.eps", "embedding.norm.eps"), 1e-5),
    "initializer_range": Use("init_std", 0.02),
    "attention_dropout": Use("attention.dropout", 0.0),
    # Dropout rates: they change no logit.
    "hidden_dropout": Inert(0.0),
    "apply_residual_connection_post_layernorm": Only(False),
    "pretraining_tp": Inert(1),
    "slow_but_exact": Inert(False),
    "tie_word_embeddings": Use("head.tied", True),
    # Options of the code that trained the checkpoints.
    **{
        name: Inert()
        for name in (
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "offset_alibi",
            "seq_length",
            "skip_bias_add",
            "skip_bias_add_qkv",
            "unk_token_id",
        )
    },
}

LAYER = "transformer.h.{n}."
QKV = LAYER + "self_attention.query_key_value."
FUSED, FUSED_BIAS = (
    "(heads | dim) embed -> heads dim embed",
    "(heads | dim) -> heads dim",
)
RULES = (
    Rule("transformer.word_embeddings.weight", "embed/weight"),
    Rule("transformer.word_embeddings_layernorm.{kind}", "embed_norm/{kind}"),
    *(Rule(QKV + "weight", f"layers/{{n}}/attn/{x}/weight", FUSED) for x in "qkv"),
    *(Rule(QKV + "bias", f"layers/{{n}}/attn/{x}/bias", FUSED_BIAS) for x in "qkv"),
    Rule(LAYER + "self_attention.dense.weight", "layers/{n}/attn/o/weight", FROM_HEADS),
    Rule(LAYER + "self_attention.dense.bias", "layers/{n}/attn/o/bias"),
    Rule(LAYER + "mlp.dense_h_to_4h.{kind}", "layers/{n}/mlp/up/{kind}"),
    Rule(LAYER + "mlp.dense_4h_to_h.{kind}", "layers/{n}/mlp/down/{kind}"),
    Rule(LAYER + "input_layernorm.{kind}", "layers/{n}/attn_norm/{kind}"),
    Rule(LAYER + "post_attention_layernorm.{kind}", "layers/{n}/mlp_norm/{kind}"),
    Rule("transformer.ln_f.{kind}", "norm/{kind}"),
    Rule("lm_head.weight", "head/weight"),
)

BLOOM = Family(
    model_type="bloom",
    architectures=("BloomForCausalLM", "BloomModel"),
    fields=FIELDS,
    aliases={
        "n_embed": "hidden_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    constants={
        "norm.kind": "layer",
        "norm.bias": True,
        "embedding.norm.kind": "layer",
        "embedding.norm.bias": True,
        "attention.alibi": True,
        "attention.qkv_bias": True,
        "attention.out_bias": True,
        "mlp.activation": "gelu_new",
        "mlp.bias": True,
        "mlp.gated": False,
    },
    parts={"mlp": MLP},
    rules=RULES,
    copies=(TIED_HEAD,),
    prefix="transformer.",
    spellings=(Prefix(body="transformer."), Prefix(body="")),
)
