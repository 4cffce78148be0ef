"""ELECTRA: BERT with a narrow embedding, as generator and as discriminator."""

from dew.converters.config.defaults import HeadClasses
from dew.converters.config.fields import Inert, Use
from dew.converters.config.transforms import embedding_width
from dew.converters.families import shared
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
    **shared.SUMMARY,
    "architectures": HeadClasses(CLASSES),
    "embedding_size": Use(
        "embedding_width", 128, read=embedding_width, inputs=("hidden_size",)
    ),
    "hidden_size": Use("embed", 256),
    "num_attention_heads": Use(("attention.heads", "attention.kv_heads"), 4),
    "intermediate_size": Use("mlp.dim", 1024),
    "summary_last_dropout": Inert(0.1),
}
RULES = (
    *encoders.embeddings("electra."),
    *encoders.affine("electra.embeddings_project", "widen"),
    *encoders.blocks("electra."),
    *encoders.affine("discriminator_predictions.dense", "head/single_dense"),
    *encoders.affine(
        "discriminator_predictions.dense_prediction", "head/single_scores"
    ),
    *encoders.affine("classifier.dense", "head/text_dense"),
    *encoders.affine("classifier.out_proj", "head/text_scores"),
    *encoders.affine("classifier", "head/token_scores"),
    *encoders.affine("generator_predictions.dense", "head/vocab_dense"),
    *encoders.affine("generator_predictions.LayerNorm", "head/vocab_norm"),
    *encoders.one_bias_head("generator_lm_head"),
)

ELECTRA = Family(
    model_type="electra",
    architectures=tuple(CLASSES),
    fields=FIELDS,
    constants=encoders.POST_NORM,
    parts={"mlp": MLP},
    rules=RULES,
    copies=encoders.tied_copies("generator_lm_head.weight", "ElectraForMaskedLM"),
    prefix="electra.",
    spellings=encoders.spellings("electra."),
    config=EncoderConfig,
    model=Encoder,
)
