"""DistilBERT: BERT without token types and without a pooler."""

from dew.converters.config.defaults import HeadClasses
from dew.converters.config.fields import Inert, Quotient, Use
from dew.converters.families import shared_encoders as encoders
from dew.converters.families.base import Family
from dew.converters.mapping.rules import Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP, EncoderConfig
from dew.nn.encoder import Encoder

CLASSES = {
    "DistilBertForMaskedLM": encoders.MASKED,
    "DistilBertModel": {},
    "DistilBertForSequenceClassification": encoders.TEXT_LABELS
    | {"readout.dense.activation": "relu"},
    "DistilBertForTokenClassification": encoders.TOKEN_LABELS,
}
FIELDS = {
    **encoders.LABELS,
    "architectures": HeadClasses(CLASSES),
    "vocab_size": Use("vocab", 30522),
    "max_position_embeddings": Use("embedding.positions", 512),
    "dim": Use("embed", 768),
    "n_layers": Use("layers", 6),
    "n_heads": Use(("attention.heads", "attention.kv_heads"), 12),
    "head_dim": Use("attention.head_dim", Quotient("dim", "n_heads")),
    "hidden_dim": Use("mlp.dim", 3072),
    "activation": Use("mlp.activation", "gelu", choices=ACTIVATIONS),
    "attention_dropout": Use("attention.dropout", 0.1),
    "initializer_range": Use("init_std", 0.02),
    # How positions are initialised; the file stores their values.
    "sinusoidal_pos_embds": Inert(False),
    "tie_weights_": Inert(),
    "dropout": Inert(0.1),
    "qa_dropout": Inert(0.1),
    "seq_classif_dropout": Inert(0.2),
}

AT, TO = "distilbert.transformer.layer.{n}.", "layers/{n}/"
RULES = (
    Rule("distilbert.embeddings.word_embeddings.weight", "embed/weight"),
    Rule("distilbert.embeddings.position_embeddings.weight", "positions/weight"),
    *encoders.affine("distilbert.embeddings.LayerNorm", "embed_norm"),
    *encoders.heads(AT + "attention.q_lin", TO + "attn/q"),
    *encoders.heads(AT + "attention.k_lin", TO + "attn/k"),
    *encoders.heads(AT + "attention.v_lin", TO + "attn/v"),
    *encoders.from_heads(AT + "attention.out_lin", TO + "attn/o"),
    *encoders.affine(AT + "sa_layer_norm", TO + "attn_norm"),
    *encoders.affine(AT + "ffn.lin1", TO + "mlp/up"),
    *encoders.affine(AT + "ffn.lin2", TO + "mlp/down"),
    *encoders.affine(AT + "output_layer_norm", TO + "mlp_norm"),
    *encoders.affine("pre_classifier", "head/text_dense"),
    *encoders.affine("classifier", "head/text_scores"),
    *encoders.affine("classifier", "head/token_scores"),
    *encoders.affine("vocab_transform", "head/vocab_dense"),
    *encoders.affine("vocab_layer_norm", "head/vocab_norm"),
    *encoders.one_bias_head("vocab_projector"),
)

DISTILBERT = Family(
    model_type="distilbert",
    architectures=tuple(CLASSES),
    fields=FIELDS,
    aliases={
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    constants={
        **encoders.POST_NORM,
        "norm.eps": 1e-12,
        "embedding.norm.eps": 1e-12,
    },
    parts={"mlp": MLP},
    rules=RULES,
    copies=encoders.tied_copies("vocab_projector.weight", "DistilBertForMaskedLM"),
    prefix="distilbert.",
    spellings=encoders.spellings("distilbert."),
    config=EncoderConfig,
    model=Encoder,
)
