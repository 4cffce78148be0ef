"""ELECTRA: BERT with a narrow embedding, a generator's head and a discriminator's."""

from dew.converters.config.defaults import Heads
from dew.converters.config.fields import Inert, Use
from dew.converters.config.transforms import other_than
from dew.converters.families import shared as parts
from dew.converters.families import shared_encoders as encoders
from dew.converters.families.base import Family
from dew.nn.config import MLP, EncoderConfig
from dew.nn.encoder import Encoder

CLASSES = {
    "ElectraForMaskedLM": encoders.MASKED | {"readout.dense.activation": "gelu"},
    "ElectraModel": {},
    "ElectraForPreTraining": {
        "readout.dense.normed": False,
        "readout.labels": 1,
        "readout.single": True,
    },
    "ElectraForSequenceClassification": encoders.TEXT_LABELS
    | {"readout.dense.activation": "gelu"},
    "ElectraForTokenClassification": encoders.TOKEN_LABELS,
}
FIELDS = {
    **encoders.SIZES,
    **encoders.LABELS,
    **parts.SUMMARY,
    "architectures": Heads(CLASSES),
    "embedding_size": Use(
        "embedding_width", 128, read=other_than, beside=("hidden_size",)
    ),
    "hidden_size": Use("embed", 256),
    "num_attention_heads": Use(("attention.heads", "attention.kv_heads"), 4),
    "intermediate_size": Use("mlp.dim", 1024),
    "summary_last_dropout": Inert(0.1),
}
RULES = (
    *encoders.embeddings("electra."),
    *encoders.both("electra.embeddings_project", "widen"),
    *encoders.blocks("electra."),
    *encoders.both("discriminator_predictions.dense", "head/single_dense"),
    *encoders.both("discriminator_predictions.dense_prediction", "head/single_scores"),
    *encoders.both("classifier.dense", "head/text_dense"),
    *encoders.both("classifier.out_proj", "head/text_scores"),
    *encoders.both("classifier", "head/token_scores"),
    *encoders.both("generator_predictions.dense", "head/vocab_dense"),
    *encoders.both("generator_predictions.LayerNorm", "head/vocab_norm"),
    *encoders.one_bias("generator_lm_head"),
)

ELECTRA = Family(
    model_type="electra",
    architectures=tuple(CLASSES),
    fields=FIELDS,
    constants=encoders.POST_NORM,
    parts={"mlp": MLP},
    rules=RULES,
    copies=encoders.tied("generator_lm_head.weight", "ElectraForMaskedLM"),
    ignored=("electra.embeddings.position_ids",),
    prefix="electra.",
    spellings=encoders.spellings("electra."),
    config=EncoderConfig,
    model=Encoder,
)
