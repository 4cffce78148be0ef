"""GPT-2: learned positions, LayerNorm, matrices stored input-first."""

from dew.converters.config import transforms
from dew.converters.config.fields import Inert, Quotient, Use
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import Prefix, Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP

FIELDS = {
    "vocab_size": Use("vocab", 50257),
    "n_positions": Use("embedding.positions", 1024),
    "n_embd": Use("embed", 768),
    "n_layer": Use("layers", 12),
    "n_head": Use(("attention.heads", "attention.kv_heads"), 12),
    "head_dim": Use("attention.head_dim", Quotient("n_embd", "n_head")),
    "n_inner": Use("mlp.dim", None, read=transforms.mlp_width, inputs=("n_embd",)),
    "n_ctx": Inert(),
    "activation_function": Use("mlp.activation", "gelu_new", choices=ACTIVATIONS),
    "attn_pdrop": Use("attention.dropout", 0.1),
    # Dropout rates: they change no logit.
    "resid_pdrop": Inert(0.1),
    "embd_pdrop": Inert(0.1),
    "layer_norm_epsilon": Use("norm.eps", 1e-5),
    "initializer_range": Use("init_std", 0.02),
    "scale_attn_weights": Use("attention.scale", True, read=transforms.score_scale),
    "scale_attn_by_inverse_layer_idx": Use("attention.scale_by_layer_number", False),
    "reorder_and_upcast_attn": Inert(False),
    "tie_word_embeddings": Use("head.tied", True),
    **shared.SUMMARY,
}

LAYER = "transformer.h.{n}."
QKV, QKV_BIAS = "embed (| heads dim) -> heads dim embed", "(| heads dim) -> heads dim"
RULES = (
    Rule("transformer.wte.weight", "embed/weight"),
    Rule("transformer.wpe.weight", "positions/weight"),
    *(
        Rule(LAYER + "attn.c_attn.weight", f"layers/{{n}}/attn/{x}/weight", QKV)
        for x in "qkv"
    ),
    *(
        Rule(LAYER + "attn.c_attn.bias", f"layers/{{n}}/attn/{x}/bias", QKV_BIAS)
        for x in "qkv"
    ),
    Rule(
        LAYER + "attn.c_proj.weight",
        "layers/{n}/attn/o/weight",
        "(heads dim) embed -> embed heads dim",
    ),
    Rule(LAYER + "attn.c_proj.bias", "layers/{n}/attn/o/bias"),
    Rule(LAYER + "mlp.c_fc.weight", "layers/{n}/mlp/up/weight", "a b -> b a"),
    Rule(LAYER + "mlp.c_fc.bias", "layers/{n}/mlp/up/bias"),
    Rule(LAYER + "mlp.c_proj.weight", "layers/{n}/mlp/down/weight", "a b -> b a"),
    Rule(LAYER + "mlp.c_proj.bias", "layers/{n}/mlp/down/bias"),
    Rule(LAYER + "ln_1.{kind}", "layers/{n}/attn_norm/{kind}"),
    Rule(LAYER + "ln_2.{kind}", "layers/{n}/mlp_norm/{kind}"),
    Rule("transformer.ln_f.{kind}", "norm/{kind}"),
    Rule("lm_head.weight", "head/weight"),
)

GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    fields=FIELDS,
    aliases=shared.GPT_NAMES,
    constants={
        "norm.kind": "layer",
        "norm.bias": True,
        "attention.qkv_bias": True,
        "attention.out_bias": True,
        "mlp.bias": True,
        "mlp.gated": False,
    },
    parts={"mlp": MLP},
    rules=RULES,
    copies=(TIED_HEAD,),
    ignored=(LAYER + "attn.bias",),
    prefix="transformer.",
    spellings=(Prefix(body="transformer."), Prefix(body="")),
)
