"""Config fields and rules of decoders that many families share.

Names are those of Llama's config and files, which most families use.
"""

from dew.converters.config.defaults import LateWindows
from dew.converters.config.fields import Field, Inert, Quotient, Read, Same, Use
from dew.converters.config.transforms import dense_layers, windows
from dew.converters.mapping.rules import FROM_HEADS, HEADS, HEADS_BIAS, Rule
from dew.nn.activations import ACTIVATIONS

SIZES: dict[str, Field] = {
    "vocab_size": Use("vocab", 32000),
    "hidden_size": Use("embed", 4096),
    "num_hidden_layers": Use("layers", 32),
    "num_attention_heads": Use("attention.heads", 32),
    "head_dim": Use(
        "attention.head_dim", Quotient("hidden_size", "num_attention_heads")
    ),
    "attention_dropout": Use("attention.dropout", 0.0),
    "intermediate_size": Use("mlp.dim", 11008),
    "hidden_act": Use("mlp.activation", "silu", choices=ACTIVATIONS),
    "tie_word_embeddings": Use("head.tied", False),
    "initializer_range": Use("init_std", 0.02),
    "max_position_embeddings": Read(2048),
}
"""Sizes, dropout and activation, with the defaults of Llama."""

GROUPED: dict[str, Field] = {
    "num_key_value_heads": Use("attention.kv_heads", Same("num_attention_heads"))
}
"""Grouped-query attention: several query heads share one key and value head."""

MULTI_HEAD: dict[str, Field] = {
    "num_attention_heads": Use(("attention.heads", "attention.kv_heads"), 32)
}
"""Multi-head attention: each query head has its own key and value head."""

RMS: dict[str, Field] = {"rms_norm_eps": Use("norm.eps", 1e-6)}
"""Epsilon of RMSNorm."""

LAYER_NORM: dict[str, Field] = {"layer_norm_eps": Use("norm.eps", 1e-5)}
"""Epsilon of LayerNorm."""

ATTENTION_BIAS: dict[str, Field] = {
    "attention_bias": Use(("attention.qkv_bias", "attention.out_bias"), False)
}
"""One flag for the biases of all four attention matrices."""

MLP_BIAS: dict[str, Field] = {"mlp_bias": Use("mlp.bias", False)}
"""One flag for the biases of all MLP matrices."""

LATE_WINDOWS: dict[str, Field] = {
    "use_sliding_window": Read(False),
    "sliding_window": Read(4096, nullable=True),
    "max_window_layers": Read(28),
    "layer_types": Use(
        "attention.windows", LateWindows(), read=windows, inputs=("sliding_window",)
    ),
}
"""Sliding windows from layer `max_window_layers` on, as in Qwen 2."""


def router_loss(default: float = 0.001) -> dict[str, Field]:
    """Fields of the router loss in training, which `output_router_logits` turns on."""
    return {
        "output_router_logits": Read(False),
        "router_aux_loss_coef": Use(
            "mlp.router_loss",
            default,
            read=lambda coefficient, is_on: coefficient if is_on else 0.0,
            inputs=("output_router_logits",),
        ),
    }


DENSE_LAYERS: dict[str, Field] = {
    "intermediate_size": Use("dense.dim", 5632),
    "mlp_only_layers": Read([], nullable=True),
    "decoder_sparse_step": Use(
        "dense_layers",
        1,
        read=dense_layers,
        inputs=("mlp_only_layers", "num_hidden_layers"),
    ),
}
"""Dense layers between those with experts, as in Qwen 2 MoE."""

SUMMARY: dict[str, Field] = {
    name: Inert()
    for name in (
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    )
}
"""Classification-head options that configs of GPT models carry along."""

GPT_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Field names of current transformers, with those that GPT config files have."""

LAYER = "model.layers.{n}."
ATTN = LAYER + "self_attn."

# A rule whose variable a model lacks is skipped, so the bias rules serve families with
# and without biases alike.
QKV = (
    *(
        Rule(ATTN + f"{x}_proj.weight", f"layers/{{n}}/attn/{x}/weight", HEADS)
        for x in "qkv"
    ),
    *(
        Rule(ATTN + f"{x}_proj.bias", f"layers/{{n}}/attn/{x}/bias", HEADS_BIAS)
        for x in "qkv"
    ),
)
"""Separate query, key and value matrices, with biases if the model has them."""

ATTENTION = (
    *QKV,
    Rule(ATTN + "o_proj.weight", "layers/{n}/attn/o/weight", FROM_HEADS),
    Rule(ATTN + "o_proj.bias", "layers/{n}/attn/o/bias"),
)
"""Separate attention matrices with the output matrix."""

EMBED = (
    Rule("model.embed_tokens.weight", "embed/weight"),
    Rule("model.norm.{kind}", "norm/{kind}"),
    Rule("lm_head.weight", "head/weight"),
)
"""Token embedding, final norm and output matrix."""

# Gate, up and down by name: with `{x}_proj` the target would also match the experts'
# `mlp/router/weight`.
DENSE = tuple(
    Rule(LAYER + f"mlp.{x}_proj.{{kind}}", f"layers/{{n}}/mlp/{x}/{{kind}}")
    for x in ("gate", "up", "down")
)
"""Gated MLPs of dense layers, in models whose other layers have experts."""

GATED_MLP = (Rule(LAYER + "mlp.{x}_proj.{kind}", "layers/{n}/mlp/{x}/{kind}"),)
"""Gated MLPs of models without experts."""

# The bar: three variables lie end to end on one stored axis, in the order of the rules.
FUSED_QKV = (
    *(
        Rule(
            ATTN + "qkv_proj.weight",
            f"layers/{{n}}/attn/{x}/weight",
            "(| heads dim) embed -> heads dim embed",
        )
        for x in "qkv"
    ),
    Rule(ATTN + "o_proj.weight", "layers/{n}/attn/o/weight", FROM_HEADS),
)
"""Query, key and value matrices stored as one, and the output matrix."""

FUSED_GATE = (
    *(
        Rule(
            LAYER + "mlp.gate_up_proj.weight",
            f"layers/{{n}}/mlp/{x}/weight",
            "(| mlp) embed -> mlp embed",
        )
        for x in ("gate", "up")
    ),
    Rule(LAYER + "mlp.down_proj.weight", "layers/{n}/mlp/down/weight"),
)
"""Gate and up matrices stored as one, and the down matrix."""

QK_NORM = (
    Rule(ATTN + "q_norm.weight", "layers/{n}/attn/q_norm/weight"),
    Rule(ATTN + "k_norm.weight", "layers/{n}/attn/k_norm/weight"),
)
"""Norms of queries and keys."""

BEFORE = (
    Rule(LAYER + "input_layernorm.{kind}", "layers/{n}/attn_norm/{kind}"),
    Rule(LAYER + "post_attention_layernorm.{kind}", "layers/{n}/mlp_norm/{kind}"),
)
"""Norms before attention and before the MLP."""

AFTER = (
    Rule(LAYER + "post_attention_layernorm.weight", "layers/{n}/attn_post_norm/weight"),
    Rule(
        LAYER + "post_feedforward_layernorm.weight", "layers/{n}/mlp_post_norm/weight"
    ),
)
"""Norms after attention and after the MLP."""

# `post_attention_layernorm` is the MLP's first norm in BEFORE, but here it is the norm
# after attention: transformers gave one name two meanings.
AROUND = (
    Rule(LAYER + "input_layernorm.weight", "layers/{n}/attn_norm/weight"),
    Rule(LAYER + "post_attention_layernorm.weight", "layers/{n}/attn_post_norm/weight"),
    Rule(LAYER + "pre_feedforward_layernorm.weight", "layers/{n}/mlp_norm/weight"),
    Rule(
        LAYER + "post_feedforward_layernorm.weight", "layers/{n}/mlp_post_norm/weight"
    ),
)
"""Norms before and after attention and the MLP."""

EXPERTS = (
    Rule(LAYER + "mlp.gate.weight", "layers/{n}/mlp/router/weight"),
    *(
        Rule(
            LAYER + f"mlp.experts.{{e}}.{x}_proj.weight",
            f"layers/{{n}}/mlp/experts/{x}/weight",
            "a b -> e a b",
        )
        for x in ("gate", "up", "down")
    ),
)
"""Router, and experts stored as one tensor each, stacked along `e`."""
