"""BERT: post-norm blocks over learned positions and two kinds of tokens."""

from dew.converters.config.defaults import Heads
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
    "architectures": Heads(CLASSES),
}

MASKED = "cls.predictions."
RULES = (
    *encoders.embeddings("bert."),
    *encoders.blocks("bert."),
    *encoders.both("bert.pooler.dense", "head/pooler_dense"),
    *encoders.both("bert.pooler.dense", "head/text_dense"),
    *encoders.both("classifier", "head/text_scores"),
    *encoders.both("classifier", "head/token_scores"),
    *encoders.both(MASKED + "transform.dense", "head/vocab_dense"),
    *encoders.both(MASKED + "transform.LayerNorm", "head/vocab_norm"),
    Rule(MASKED + "bias", "head/vocab_tied/bias"),
    *encoders.both(MASKED + "decoder", "head/vocab_own"),
)

BERT = Family(
    model_type="bert",
    architectures=tuple(CLASSES),
    fields=FIELDS,
    constants=encoders.POST_NORM,
    parts={"mlp": MLP},
    rules=RULES,
    copies=encoders.tied(
        MASKED + "decoder.weight",
        "BertForMaskedLM",
        bias=MASKED + "decoder.bias",
    ),
    # Buffers, what masked language models leave of pretraining, and the bias that is
    # none where the table is not tied.
    ignored=(
        "bert.embeddings.position_ids",
        "bert.pooler.dense.{kind}",
        "cls.seq_relationship.{kind}",
        MASKED + "bias",
    ),
    prefix="bert.",
    spellings=encoders.spellings("bert."),
    config=EncoderConfig,
    model=Encoder,
)
