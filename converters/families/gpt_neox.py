"""GPT-NeoX and Pythia: parallel parts with their own norms, partial RoPE."""

from dew.converters.config.fields import Inert, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families import shared
from dew.converters.families.base import Copy, Family
from dew.converters.mapping.rules import FROM_HEADS, Prefix, Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.LAYER_NORM,
    "vocab_size": Use("vocab", 50432),
    "hidden_size": Use("embed", 6144),
    "num_hidden_layers": Use("layers", 44),
    "num_attention_heads": Use(("attention.heads", "attention.kv_heads"), 64),
    "intermediate_size": Use("mlp.dim", 24576),
    "hidden_act": Use("mlp.activation", "gelu", choices=ACTIVATIONS),
    "attention_bias": Use(("attention.qkv_bias", "attention.out_bias"), True),
    "use_parallel_residual": Use("residual.parallel", True),
    # Dropout rates: they change no logit.
    "hidden_dropout": Inert(0.0),
    "classifier_dropout": Inert(0.1),
    "is_decoder": Inert(False),
}

LAYER = "gpt_neox.layers.{n}."
QKV = LAYER + "attention.query_key_value."
FUSED, FUSED_BIAS = (
    "(heads | dim) embed -> heads dim embed",
    "(heads | dim) -> heads dim",
)
RULES = (
    Rule("gpt_neox.embed_in.weight", "embed/weight"),
    *(Rule(QKV + "weight", f"layers/{{n}}/attn/{x}/weight", FUSED) for x in "qkv"),
    *(Rule(QKV + "bias", f"layers/{{n}}/attn/{x}/bias", FUSED_BIAS) for x in "qkv"),
    Rule(LAYER + "attention.dense.weight", "layers/{n}/attn/o/weight", FROM_HEADS),
    Rule(LAYER + "attention.dense.bias", "layers/{n}/attn/o/bias"),
    Rule(LAYER + "mlp.dense_h_to_4h.{kind}", "layers/{n}/mlp/up/{kind}"),
    Rule(LAYER + "mlp.dense_4h_to_h.{kind}", "layers/{n}/mlp/down/{kind}"),
    Rule(LAYER + "input_layernorm.{kind}", "layers/{n}/attn_norm/{kind}"),
    Rule(LAYER + "post_attention_layernorm.{kind}", "layers/{n}/mlp_norm/{kind}"),
    Rule("gpt_neox.final_layer_norm.{kind}", "norm/{kind}"),
    Rule("embed_out.weight", "head/weight"),
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    fields=FIELDS,
    ropes=(
        RopeFields(
            partial=True,
            fraction=0.25,
            old_theta="rotary_emb_base",
            old_fraction="rotary_pct",
        ),
    ),
    constants={
        "norm.kind": "layer",
        "norm.bias": True,
        "mlp.bias": True,
        "mlp.gated": False,
    },
    parts={"mlp": MLP},
    rules=RULES,
    copies=(
        Copy(
            source="embed_out.weight", target="embed/weight", flag="tie_word_embeddings"
        ),
    ),
    ignored=(LAYER + "attention.bias",),
    prefix="gpt_neox.",
    spellings=(Prefix(body="gpt_neox."), Prefix(body="")),
)
