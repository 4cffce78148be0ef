"""ALBERT: BERT with a narrow embedding and one set of weights for all layers."""

from dew.converters.config.defaults import HeadClasses
from dew.converters.config.fields import Inert, MultiUse, Only, Read, Use
from dew.converters.config.transforms import shared_blocks
from dew.converters.families import shared_encoders as encoders
from dew.converters.families.base import Family
from dew.converters.mapping.rules import Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP, EncoderConfig
from dew.nn.encoder import Encoder

CLASSES = {
    "AlbertForMaskedLM": encoders.MASKED,
    "AlbertModel": encoders.POOLER,
    "AlbertForSequenceClassification": encoders.TEXT_LABELS | encoders.POOLER,
    "AlbertForTokenClassification": encoders.TOKEN_LABELS,
}
FIELDS = {
    **encoders.SIZES,
    **encoders.LABELS,
    "architectures": HeadClasses(CLASSES),
    "vocab_size": Use("vocab", 30000),
    "embedding_size": Use("embedding_width", 128),
    "hidden_size": Use("embed", 4096),
    "num_hidden_layers": MultiUse(
        Use("layers", 12),
        Use("shared", 12, read=shared_blocks, inputs=("num_hidden_groups",)),
    ),
    "num_hidden_groups": Read(1),
    "inner_group_num": Only(1),
    "num_attention_heads": Use(("attention.heads", "attention.kv_heads"), 64),
    "intermediate_size": Use("mlp.dim", 16384),
    "hidden_act": Use("mlp.activation", "gelu_new", choices=ACTIVATIONS),
    "attention_probs_dropout_prob": Use("attention.dropout", 0.0),
    "hidden_dropout_prob": Inert(0.0),
    "classifier_dropout_prob": Inert(0.1),
    # Options of the code that trained the first models; transformers never read them.
    "down_scale_factor": Inert(),
    "eos_token_ids": Inert(),
    "gap_size": Inert(),
    "net_structure_type": Inert(),
    "num_memory_blocks": Inert(),
    "output_past": Inert(),
}

AT, TO = "albert.encoder.albert_layer_groups.{n}.albert_layers.0.", "layers/{n}/"
RULES = (
    *encoders.embeddings("albert."),
    *encoders.affine("albert.encoder.embedding_hidden_mapping_in", "widen"),
    *encoders.heads(AT + "attention.query", TO + "attn/q"),
    *encoders.heads(AT + "attention.key", TO + "attn/k"),
    *encoders.heads(AT + "attention.value", TO + "attn/v"),
    *encoders.from_heads(AT + "attention.dense", TO + "attn/o"),
    *encoders.affine(AT + "attention.LayerNorm", TO + "attn_norm"),
    *encoders.affine(AT + "ffn", TO + "mlp/up"),
    *encoders.affine(AT + "ffn_output", TO + "mlp/down"),
    *encoders.affine(AT + "full_layer_layer_norm", TO + "mlp_norm"),
    *encoders.affine("albert.pooler", "head/pooler_dense"),
    *encoders.affine("albert.pooler", "head/text_dense"),
    *encoders.affine("classifier", "head/text_scores"),
    *encoders.affine("classifier", "head/token_scores"),
    *encoders.affine("predictions.dense", "head/vocab_dense"),
    *encoders.affine("predictions.LayerNorm", "head/vocab_norm"),
    Rule("predictions.bias", "head/vocab_tied/bias"),
    *encoders.affine("predictions.decoder", "head/vocab_own"),
)

ALBERT = Family(
    model_type="albert",
    architectures=tuple(CLASSES),
    fields=FIELDS,
    constants=encoders.POST_NORM,
    parts={"mlp": MLP},
    rules=RULES,
    copies=encoders.tied_copies(
        "predictions.decoder.weight",
        "AlbertForMaskedLM",
        bias="predictions.decoder.bias",
    ),
    ignored=(
        "albert.pooler.{kind}",
        "sop_classifier.classifier.{kind}",
        "predictions.bias",
    ),
    prefix="albert.",
    spellings=encoders.spellings("albert."),
    config=EncoderConfig,
    model=Encoder,
)
