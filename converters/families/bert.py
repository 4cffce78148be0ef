"""BERT: post-norm encoder with learned positions and token types."""

from dew.converters.config.defaults import HeadClasses
from dew.converters.families import shared_encoders as encoders
from dew.converters.families.base import Family
from dew.converters.mapping.rules import Rule
from dew.nn.config import MLP, EncoderConfig
from dew.nn.encoder import Encoder

CLASSES = {
    "BertForMaskedLM": encoders.MASKED,
    "BertModel": encoders.POOLER,
    "BertForSequenceClassification": encoders.TEXT_LABELS | encoders.POOLER,
    "BertForTokenClassification": encoders.TOKEN_LABELS,
}
FIELDS = {
    **encoders.SIZES,
    **encoders.LABELS,
    "architectures": HeadClasses(CLASSES),
}

MASKED = "cls.predictions."
RULES = (
    *encoders.embeddings("bert."),
    *encoders.blocks("bert."),
    *encoders.affine("bert.pooler.dense", "head/pooler_dense"),
    *encoders.affine("bert.pooler.dense", "head/text_dense"),
    *encoders.affine("classifier", "head/text_scores"),
    *encoders.affine("classifier", "head/token_scores"),
    *encoders.affine(MASKED + "transform.dense", "head/vocab_dense"),
    *encoders.affine(MASKED + "transform.LayerNorm", "head/vocab_norm"),
    Rule(MASKED + "bias", "head/vocab_tied/bias"),
    *encoders.affine(MASKED + "decoder", "head/vocab_own"),
)

BERT = Family(
    model_type="bert",
    architectures=tuple(CLASSES),
    fields=FIELDS,
    constants=encoders.POST_NORM,
    parts={"mlp": MLP},
    rules=RULES,
    copies=encoders.tied_copies(
        MASKED + "decoder.weight",
        "BertForMaskedLM",
        bias=MASKED + "decoder.bias",
    ),
    # Buffers, pretraining heads that a masked language model keeps, and the tied
    # head's bias, which an untied head does not read.
    ignored=(
        "bert.pooler.dense.{kind}",
        "cls.seq_relationship.{kind}",
        MASKED + "bias",
    ),
    prefix="bert.",
    spellings=encoders.spellings("bert."),
    config=EncoderConfig,
    model=Encoder,
)
