"""OPT: learned positions that skip padding, ReLU MLPs.

The 350M model has a narrow embedding and norms after each residual sum.
"""

from dew.converters.config import transforms
from dew.converters.config.fields import Inert, Only, Quotient, Same, Use
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import FROM_HEADS, HEADS, HEADS_BIAS, Prefix, Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP

FIELDS = {
    "vocab_size": Use("vocab", 50272),
    "hidden_size": Use("embed", 768),
    "num_hidden_layers": Use("layers", 12),
    "num_attention_heads": Use(("attention.heads", "attention.kv_heads"), 12),
    "head_dim": Use(
        "attention.head_dim", Quotient("hidden_size", "num_attention_heads")
    ),
    "ffn_dim": Use("mlp.dim", 3072),
    "max_position_embeddings": Use("embedding.positions", 2048),
    "do_layer_norm_before": Use("residual.norms", True, read=transforms.norm_position),
    "_remove_final_layer_norm": Only(False),
    "word_embed_proj_dim": Use(
        "embedding_width",
        Same("hidden_size"),
        read=transforms.embedding_width,
        inputs=("hidden_size",),
    ),
    "activation_function": Use("mlp.activation", "relu", choices=ACTIVATIONS),
    "attention_dropout": Use("attention.dropout", 0.0),
    # Dropout rates: they change no logit.
    "dropout": Inert(0.1),
    "activation_dropout": Inert(0.0),
    "layerdrop": Inert(0.0),
    "init_std": Use("init_std", 0.02),
    "enable_bias": Use(("attention.qkv_bias", "attention.out_bias", "mlp.bias"), True),
    "layer_norm_elementwise_affine": Use(("norm.scaled", "norm.bias"), True),
    "tie_word_embeddings": Use("head.tied", True),
}

LAYER = "model.decoder.layers.{n}."
ATTN = LAYER + "self_attn."
RULES = (
    Rule("model.decoder.embed_tokens.weight", "embed/weight"),
    Rule("model.decoder.embed_positions.weight", "positions/weight"),
    *(
        Rule(ATTN + f"{x}_proj.weight", f"layers/{{n}}/attn/{x}/weight", HEADS)
        for x in "qkv"
    ),
    *(
        Rule(ATTN + f"{x}_proj.bias", f"layers/{{n}}/attn/{x}/bias", HEADS_BIAS)
        for x in "qkv"
    ),
    Rule(ATTN + "out_proj.weight", "layers/{n}/attn/o/weight", FROM_HEADS),
    Rule(ATTN + "out_proj.bias", "layers/{n}/attn/o/bias"),
    Rule(LAYER + "fc1.{kind}", "layers/{n}/mlp/up/{kind}"),
    Rule(LAYER + "fc2.{kind}", "layers/{n}/mlp/down/{kind}"),
    Rule(LAYER + "self_attn_layer_norm.{kind}", "layers/{n}/attn_norm/{kind}"),
    Rule(LAYER + "final_layer_norm.{kind}", "layers/{n}/mlp_norm/{kind}"),
    Rule("model.decoder.final_layer_norm.{kind}", "norm/{kind}"),
    Rule("model.decoder.project_in.weight", "widen/weight"),
    Rule("model.decoder.project_out.weight", "narrow/weight"),
    Rule("lm_head.weight", "head/weight"),
)

OPT = Family(
    model_type="opt",
    architectures=("OPTForCausalLM", "OPTModel"),
    fields=FIELDS,
    constants={
        "norm.kind": "layer",
        "norm.eps": 1e-5,
        "mlp.gated": False,
        "embedding.offset": 2,
        "embedding.positions_from_mask": True,
    },
    parts={"mlp": MLP},
    rules=RULES,
    copies=(TIED_HEAD,),
    prefix="model.",
    spellings=(Prefix(body="model."), Prefix(body="")),
)
