"""Config fields, heads and rules that encoder families share."""

from typing import Any

from dew.converters.config.defaults import NumLabels
from dew.converters.config.fields import Field, Inert, Only, Quotient, Read, Same, Use
from dew.converters.families.base import Copy
from dew.converters.mapping.rules import FROM_HEADS, HEADS, HEADS_BIAS, Prefix, Rule
from dew.nn.activations import ACTIVATIONS

SIZES: dict[str, Field] = {
    "vocab_size": Use("vocab", 30522),
    "hidden_size": Use("embed", 768),
    "num_hidden_layers": Use("layers", 12),
    "num_attention_heads": Use(("attention.heads", "attention.kv_heads"), 12),
    "head_dim": Use(
        "attention.head_dim", Quotient("hidden_size", "num_attention_heads")
    ),
    "intermediate_size": Use("mlp.dim", 3072),
    "hidden_act": Use("mlp.activation", "gelu", choices=ACTIVATIONS),
    "max_position_embeddings": Use("embedding.positions", 512),
    "type_vocab_size": Use("types", 2),
    "layer_norm_eps": Use(("norm.eps", "embedding.norm.eps"), 1e-12),
    "initializer_range": Use("init_std", 0.02),
    "attention_probs_dropout_prob": Use("attention.dropout", 0.1),
    "position_embedding_type": Only("absolute"),
    "is_decoder": Only(False),
}
"""Sizes, dropout and activation, with the defaults of BERT."""

LABELS: dict[str, Field] = {
    "id2label": Read(),
    "num_labels": Read(2, nullable=True),
    "tie_word_embeddings": Read(True),
    # Dropout rates: they change no logit.
    "hidden_dropout_prob": Inert(0.1),
    "classifier_dropout": Inert(),
    # Recomputes activations to save memory.
    "gradient_checkpointing": Inert(False),
}
"""Fields that heads read, and training options that change no logit."""

POST_NORM: dict[str, Any] = {
    "norm.kind": "layer",
    "norm.bias": True,
    "embedding.norm.kind": "layer",
    "embedding.norm.bias": True,
    "residual.norms": "sum",
    "attention.qkv_bias": True,
    "attention.out_bias": True,
    "mlp.bias": True,
    "mlp.gated": False,
}
"""Blocks with biases, an MLP without a gate, and a norm after each sum."""

MASKED: dict[str, Any] = {
    "readout.dense.normed": True,
    "readout.head.bias": True,
    "readout.head.tied": Same("tie_word_embeddings"),
}
"""Masked-LM head: dense layer, norm, and output matrix with a bias."""

POOLER: dict[str, Any] = {"readout.pool": "first", "readout.dense.activation": "tanh"}
"""Pooler: the first token's hidden state through a dense layer and tanh."""

TEXT_LABELS: dict[str, Any] = {"readout.pool": "first", "readout.labels": NumLabels()}
"""Head of a text classifier, on the first token's hidden state."""

TOKEN_LABELS: dict[str, Any] = {"readout.labels": NumLabels()}
"""Head of a token classifier, on every hidden state."""


def spellings(prefix: str) -> tuple[Prefix, ...]:
    """Stored names with the prefix or without, each with the norms' old names too."""
    # Checkpoints from TensorFlow have gamma and beta, which transformers still reads.
    norm = "LayerNorm."
    old = ((norm + "weight", norm + "gamma"), (norm + "bias", norm + "beta"))
    return (
        Prefix(body=prefix),
        Prefix(body=""),
        Prefix(body=prefix, names=old),
        Prefix(body="", names=old),
    )


def tied_copies(
    weight: str, *classes: str, bias: str | None = None
) -> tuple[Copy, ...]:
    """Copies in a tied head: its matrix, and a second name of its bias if given."""
    flag = "tie_word_embeddings"
    pairs = [(weight, "embed/weight")]
    if bias is not None:
        pairs.append((bias, "head/vocab_tied/bias"))
    return tuple(
        Copy(source=source, target=target, flag=flag, classes=classes)
        for source, target in pairs
    )


def affine(source: str, target: str) -> tuple[Rule, ...]:
    """Rules of the weight and bias of a linear map or a norm."""
    return tuple(Rule(f"{source}.{k}", f"{target}/{k}") for k in ("weight", "bias"))


def heads(source: str, target: str) -> tuple[Rule, ...]:
    """Rules of a linear map from hidden states to heads."""
    return (
        Rule(f"{source}.weight", f"{target}/weight", HEADS),
        Rule(f"{source}.bias", f"{target}/bias", HEADS_BIAS),
    )


def from_heads(source: str, target: str) -> tuple[Rule, ...]:
    """Rules of a linear map from heads to hidden states."""
    return (
        Rule(f"{source}.weight", f"{target}/weight", FROM_HEADS),
        Rule(f"{source}.bias", f"{target}/bias"),
    )


def embeddings(prefix: str) -> tuple[Rule, ...]:
    """Rules of BERT's token, position and type embeddings and their norm."""
    at = f"{prefix}embeddings."
    return (
        Rule(at + "word_embeddings.weight", "embed/weight"),
        Rule(at + "position_embeddings.weight", "positions/weight"),
        Rule(at + "token_type_embeddings.weight", "types/weight"),
        *affine(at + "LayerNorm", "embed_norm"),
    )


def one_bias_head(source: str) -> tuple[Rule, ...]:
    """Rules of an output head whose bias has one stored name, tied or not."""
    return (
        Rule(f"{source}.bias", "head/vocab_tied/bias"),
        *affine(source, "head/vocab_own"),
    )


def blocks(prefix: str) -> tuple[Rule, ...]:
    """Rules of BERT's blocks: attention, MLP and their norms."""
    at, to = f"{prefix}encoder.layer.{{n}}.", "layers/{n}/"
    return (
        *heads(at + "attention.self.query", to + "attn/q"),
        *heads(at + "attention.self.key", to + "attn/k"),
        *heads(at + "attention.self.value", to + "attn/v"),
        *from_heads(at + "attention.output.dense", to + "attn/o"),
        *affine(at + "attention.output.LayerNorm", to + "attn_norm"),
        *affine(at + "intermediate.dense", to + "mlp/up"),
        *affine(at + "output.dense", to + "mlp/down"),
        *affine(at + "output.LayerNorm", to + "mlp_norm"),
    )
