"""GPT-J: parallel parts behind one norm, interleaved partial RoPE."""

from dew.converters.config import transforms
from dew.converters.config.fields import Inert, Only, Quotient, Read, Use
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import FROM_HEADS, HEADS, Prefix, Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP

FIELDS = {
    "vocab_size": Use("vocab", 50400),
    "n_positions": Read(2048),
    "n_embd": Use("embed", 4096),
    "n_layer": Use("layers", 28),
    "n_head": Use(("attention.heads", "attention.kv_heads"), 16),
    "head_dim": Use("attention.head_dim", Quotient("n_embd", "n_head")),
    "rotary_dim": Use("attention.rope", 64, read=transforms.interleaved_rope),
    "n_inner": Use("mlp.dim", None, read=transforms.mlp_width, inputs=("n_embd",)),
    "n_ctx": Inert(),
    "activation_function": Use("mlp.activation", "gelu_new", choices=ACTIVATIONS),
    "attn_pdrop": Use("attention.dropout", 0.0),
    # Dropout rates: they change no logit.
    "resid_pdrop": Inert(0.0),
    "embd_pdrop": Inert(0.0),
    "layer_norm_epsilon": Use("norm.eps", 1e-5),
    "initializer_range": Use("init_std", 0.02),
    "tie_word_embeddings": Use("head.tied", False),
    # Options of old implementations.
    "rotary": Only(True),
    "scale_attn_weights": Only(True),
    **shared.SUMMARY,
}

LAYER = "transformer.h.{n}."
RULES = (
    Rule("transformer.wte.weight", "embed/weight"),
    *(
        Rule(LAYER + f"attn.{x}_proj.weight", f"layers/{{n}}/attn/{x}/weight", HEADS)
        for x in "qkv"
    ),
    Rule(LAYER + "attn.out_proj.weight", "layers/{n}/attn/o/weight", FROM_HEADS),
    Rule(LAYER + "mlp.fc_in.{kind}", "layers/{n}/mlp/up/{kind}"),
    Rule(LAYER + "mlp.fc_out.{kind}", "layers/{n}/mlp/down/{kind}"),
    Rule(LAYER + "ln_1.{kind}", "layers/{n}/attn_norm/{kind}"),
    Rule("transformer.ln_f.{kind}", "norm/{kind}"),
    Rule("lm_head.{kind}", "head/{kind}"),
)

GPTJ = Family(
    model_type="gptj",
    architectures=("GPTJForCausalLM", "GPTJModel"),
    fields=FIELDS,
    aliases=shared.GPT_NAMES,
    constants={
        "norm.kind": "layer",
        "norm.bias": True,
        "residual.parallel": True,
        "residual.shared": True,
        "mlp.bias": True,
        "mlp.gated": False,
        "head.bias": True,
    },
    parts={"mlp": MLP},
    rules=RULES,
    copies=(TIED_HEAD,),
    ignored=(LAYER + "attn.bias",),
    prefix="transformer.",
    spellings=(Prefix(body="transformer."), Prefix(body="")),
)
