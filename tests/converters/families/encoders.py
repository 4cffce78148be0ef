"""Tiny random configs of the encoder families, as masked language models."""

from collections.abc import Mapping

import transformers as hf

from tests.converters.families.case import SIZES, WIDTH, Tiny, without

ENCODERS: Mapping[str, Tiny] = {
    "bert": Tiny(
        config=hf.BertConfig,
        fields=SIZES,
        variants=(
            {"hidden_act": "gelu_new", "type_vocab_size": 3},
            {"tie_word_embeddings": False},
        ),
        positions="max_position_embeddings",
        model=hf.BertForMaskedLM,
    ),
    "roberta": Tiny(
        config=hf.RobertaConfig,
        fields={**SIZES, "pad_token_id": 3},
        variants=(
            {"hidden_act": "gelu_new", "type_vocab_size": 1},
            {"tie_word_embeddings": False},
        ),
        positions="max_position_embeddings",
        first_position=4,
        model=hf.RobertaForMaskedLM,
    ),
    "distilbert": Tiny(
        config=hf.DistilBertConfig,
        fields={
            **without(
                SIZES,
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
            ),
            "dim": WIDTH,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
        },
        variants=({"activation": "relu"}, {"tie_word_embeddings": False}),
        positions="max_position_embeddings",
        model=hf.DistilBertForMaskedLM,
    ),
    "electra": Tiny(
        config=hf.ElectraConfig,
        fields={**SIZES, "embedding_size": 12},
        variants=({"embedding_size": WIDTH}, {"tie_word_embeddings": False}),
        positions="max_position_embeddings",
        model=hf.ElectraForMaskedLM,
    ),
    "albert": Tiny(
        config=hf.AlbertConfig,
        fields={
            **SIZES,
            "embedding_size": 12,
            "num_hidden_layers": 3,
            "num_hidden_groups": 2,
        },
        variants=({"num_hidden_groups": 1}, {"tie_word_embeddings": False}),
        positions="max_position_embeddings",
        model=hf.AlbertForMaskedLM,
    ),
    "modernbert": Tiny(
        config=hf.ModernBertConfig,
        fields={
            **SIZES,
            "num_hidden_layers": 3,
            "local_attention": 8,
            "layer_types": [
                "full_attention",
                "sliding_attention",
                "sliding_attention",
            ],
        },
        variants=(
            {
                "attention_bias": True,
                "mlp_bias": True,
                "norm_bias": True,
                "classifier_bias": True,
            },
            {"decoder_bias": False, "classifier_activation": "relu"},
            {"tie_word_embeddings": False},
        ),
        model=hf.ModernBertForMaskedLM,
    ),
}
"""By `model_type`."""
