"""ModernBERT: pre-norm encoder with RoPE, local attention and gated MLPs."""

from typing import Any

from dew.converters.config.defaults import HeadClasses, LeadingFull, Pooling
from dew.converters.config.fields import Inert, Quotient, Read, Same, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import half_windows
from dew.converters.families import shared_encoders as encoders
from dew.converters.families.base import Family
from dew.converters.mapping.rules import FROM_HEADS, Prefix, Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP, EncoderConfig
from dew.nn.encoder import Encoder

DENSE: dict[str, Any] = {
    "readout.dense.activation": Same("classifier_activation"),
    "readout.dense.bias": Same("classifier_bias"),
    "readout.dense.normed": True,
}
CLASSES = {
    "ModernBertForMaskedLM": DENSE
    | {
        "readout.head.bias": Same("decoder_bias"),
        "readout.head.tied": Same("tie_word_embeddings"),
    },
    "ModernBertModel": {},
    "ModernBertForSequenceClassification": DENSE
    | encoders.TEXT_LABELS
    | {"readout.pool": Pooling()},
    "ModernBertForTokenClassification": DENSE | encoders.TOKEN_LABELS,
}
FIELDS = {
    **encoders.LABELS,
    "architectures": HeadClasses(CLASSES),
    "vocab_size": Use("vocab", 50368),
    "hidden_size": Use("embed", 768),
    "intermediate_size": Use("mlp.dim", 1152),
    "num_hidden_layers": Use("layers", 22),
    "num_attention_heads": Use(("attention.heads", "attention.kv_heads"), 12),
    "head_dim": Use(
        "attention.head_dim", Quotient("hidden_size", "num_attention_heads")
    ),
    "hidden_activation": Use("mlp.activation", "gelu", choices=ACTIVATIONS),
    "max_position_embeddings": Read(8192),
    "initializer_range": Use("init_std", 0.02),
    "initializer_cutoff_factor": Inert(2.0),
    "norm_eps": Use(("norm.eps", "embedding.norm.eps"), 1e-5),
    "norm_bias": Use(("norm.bias", "embedding.norm.bias"), False),
    "attention_bias": Use(("attention.qkv_bias", "attention.out_bias"), False),
    "attention_dropout": Use("attention.dropout", 0.0),
    "layer_types": Use(
        "attention.windows",
        LeadingFull("global_attn_every_n_layers"),
        read=half_windows,
        inputs=("local_attention",),
    ),
    "global_attn_every_n_layers": Read(3),
    "local_attention": Read(128),
    "mlp_bias": Use("mlp.bias", False),
    "decoder_bias": Read(True),
    "classifier_bias": Read(False),
    "classifier_activation": Read("gelu"),
    "classifier_pooling": Read("cls"),
    "cls_token_id": Inert(),
    "embedding_dropout": Inert(0.0),
    "mlp_dropout": Inert(0.0),
    # Which kernels run, and on which tokens; the logits are the same.
    "deterministic_flash_attn": Inert(False),
    "reference_compile": Inert(),
    "repad_logits_with_grad": Inert(False),
    "sparse_prediction": Inert(False),
    "sparse_pred_ignore_index": Inert(-100),
}

AT, TO = "model.layers.{n}.", "layers/{n}/"
RULES = (
    Rule("model.embeddings.tok_embeddings.weight", "embed/weight"),
    *encoders.affine("model.embeddings.norm", "embed_norm"),
    *(
        Rule(
            AT + "attn.Wqkv.weight",
            TO + f"attn/{x}/weight",
            "(| heads dim) embed -> heads dim embed",
        )
        for x in "qkv"
    ),
    *(
        Rule(AT + "attn.Wqkv.bias", TO + f"attn/{x}/bias", "(| heads dim) -> heads dim")
        for x in "qkv"
    ),
    Rule(AT + "attn.Wo.weight", TO + "attn/o/weight", FROM_HEADS),
    Rule(AT + "attn.Wo.bias", TO + "attn/o/bias"),
    *encoders.affine(AT + "attn_norm", TO + "attn_norm"),
    *(
        Rule(AT + "mlp.Wi.weight", TO + f"mlp/{x}/weight", "(| mlp) embed -> mlp embed")
        for x in ("gate", "up")
    ),
    *(
        Rule(AT + "mlp.Wi.bias", TO + f"mlp/{x}/bias", "(| mlp) -> mlp")
        for x in ("gate", "up")
    ),
    *encoders.affine(AT + "mlp.Wo", TO + "mlp/down"),
    *encoders.affine(AT + "mlp_norm", TO + "mlp_norm"),
    *encoders.affine("model.final_norm", "norm"),
    *(
        rule
        for kind in ("vocab", "text", "token")
        for rule in (
            *encoders.affine("head.dense", f"head/{kind}_dense"),
            *encoders.affine("head.norm", f"head/{kind}_norm"),
        )
    ),
    *encoders.affine("classifier", "head/text_scores"),
    *encoders.affine("classifier", "head/token_scores"),
    *encoders.one_bias_head("decoder"),
)

MODERNBERT = Family(
    model_type="modernbert",
    architectures=tuple(CLASSES),
    fields=FIELDS,
    ropes=(
        RopeFields(
            theta=160_000.0,
            layer_type="full_attention",
            old_theta="global_rope_theta",
        ),
        RopeFields(
            to="attention.local_rope",
            layer_type="sliding_attention",
            old_theta="local_rope_theta",
        ),
    ),
    constants={
        "norm.kind": "layer",
        "embedding.norm.kind": "layer",
        "residual.no_first_norm": True,
    },
    parts={"mlp": MLP},
    rules=RULES,
    copies=encoders.tied_copies("decoder.weight", "ModernBertForMaskedLM"),
    spellings=(Prefix(body="model."), Prefix(body="")),
    config=EncoderConfig,
    model=Encoder,
)
