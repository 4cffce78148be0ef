"""RoBERTa: BERT whose positions start after the padding id and skip padding."""

from dew.converters.config.defaults import HeadClasses
from dew.converters.config.fields import MultiUse, Use
from dew.converters.config.transforms import rows_after
from dew.converters.families import shared_encoders as encoders
from dew.converters.families.base import Family
from dew.converters.mapping.rules import Rule
from dew.nn.config import MLP, EncoderConfig
from dew.nn.encoder import Encoder

CLASSES = {
    "RobertaForMaskedLM": encoders.MASKED | {"readout.dense.activation": "gelu"},
    "RobertaModel": encoders.POOLER,
    "RobertaForSequenceClassification": encoders.TEXT_LABELS | encoders.POOLER,
    "RobertaForTokenClassification": encoders.TOKEN_LABELS,
}
FIELDS = {
    **encoders.SIZES,
    **encoders.LABELS,
    "architectures": HeadClasses(CLASSES),
    "vocab_size": Use("vocab", 50265),
    "pad_token_id": MultiUse(
        Use("padding", 1), Use("embedding.offset", 1, read=lambda padding: padding + 1)
    ),
    "max_position_embeddings": Use(
        "embedding.positions", 512, read=rows_after, inputs=("pad_token_id",)
    ),
}
RULES = (
    *encoders.embeddings("roberta."),
    *encoders.blocks("roberta."),
    *encoders.affine("roberta.pooler.dense", "head/pooler_dense"),
    *encoders.affine("classifier.dense", "head/text_dense"),
    *encoders.affine("classifier.out_proj", "head/text_scores"),
    *encoders.affine("classifier", "head/token_scores"),
    *encoders.affine("lm_head.dense", "head/vocab_dense"),
    *encoders.affine("lm_head.layer_norm", "head/vocab_norm"),
    Rule("lm_head.bias", "head/vocab_tied/bias"),
    *encoders.affine("lm_head.decoder", "head/vocab_own"),
)

ROBERTA = Family(
    model_type="roberta",
    architectures=tuple(CLASSES),
    fields=FIELDS,
    constants=encoders.POST_NORM,
    parts={"mlp": MLP},
    rules=RULES,
    copies=encoders.tied_copies(
        "lm_head.decoder.weight",
        "RobertaForMaskedLM",
        bias="lm_head.decoder.bias",
    ),
    ignored=(
        "roberta.pooler.dense.{kind}",
        "lm_head.bias",
    ),
    prefix="roberta.",
    spellings=encoders.spellings("roberta."),
    config=EncoderConfig,
    model=Encoder,
)
