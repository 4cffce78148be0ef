"""Fields and rules that many families share, under the names most of them use."""

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
    "hidden_act": Use("mlp.activation", "silu", among=ACTIVATIONS),
    "tie_word_embeddings": Use("head.tied", False),
    "initializer_range": Use("init_std", 0.02),
    "max_position_embeddings": Read(2048),
}
"""What most decoders state."""

GROUPED: dict[str, Field] = {
    "num_key_value_heads": Use("attention.kv_heads", Same("num_attention_heads"))
}
"""Queries that share keys and values."""

MULTI_HEAD: dict[str, Field] = {
    "num_attention_heads": Use(("attention.heads", "attention.kv_heads"), 32)
}
"""Keys and values of its own for each query."""

RMS: dict[str, Field] = {"rms_norm_eps": Use("norm.eps", 1e-6)}
LAYER_NORM: dict[str, Field] = {"layer_norm_eps": Use("norm.eps", 1e-5)}

ATTENTION_BIAS: dict[str, Field] = {
    "attention_bias": Use(("attention.qkv_bias", "attention.out_bias"), False)
}
MLP_BIAS: dict[str, Field] = {"mlp_bias": Use("mlp.bias", False)}

LATE_WINDOWS: dict[str, Field] = {
    "use_sliding_window": Read(False),
    "sliding_window": Read(4096, nullable=True),
    "max_window_layers": Read(28),
    "layer_types": Use(
        "attention.windows", LateWindows(), read=windows, beside=("sliding_window",)
    ),
}
"""Windows from some layer on, as Qwen has them."""

ROUTER_LOSS: dict[str, Field] = {
    "output_router_logits": Inert(False),
    "router_aux_loss_coef": Inert(0.001),
}
"""Of a training loss that objectives state for themselves."""

DENSE_LAYERS: dict[str, Field] = {
    "intermediate_size": Use("dense.dim", 5632),
    "mlp_only_layers": Read([], nullable=True),
    "decoder_sparse_step": Use(
        "dense_layers",
        1,
        read=dense_layers,
        beside=("mlp_only_layers", "num_hidden_layers"),
    ),
}
"""Layers without experts between those with, as Qwen may have them."""

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
"""Of a head for classification that GPT configs carry along."""

GPT_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""New names of GPT's fields, and those that the files have."""

LAYER = "model.layers.{n}."
ATTN = LAYER + "self_attn."


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
ATTENTION = (
    *QKV,
    Rule(ATTN + "o_proj.weight", "layers/{n}/attn/o/weight", FROM_HEADS),
    Rule(ATTN + "o_proj.bias", "layers/{n}/attn/o/bias"),
)
EMBED = (
    Rule("model.embed_tokens.weight", "embed/weight"),
    Rule("model.norm.{kind}", "norm/{kind}"),
    Rule("lm_head.weight", "head/weight"),
)
DENSE = tuple(
    Rule(LAYER + f"mlp.{x}_proj.{{kind}}", f"layers/{{n}}/mlp/{x}/{{kind}}")
    for x in ("gate", "up", "down")
)
"""Gated MLPs of the layers without experts, beside those with."""
GATED_MLP = (Rule(LAYER + "mlp.{x}_proj.{kind}", "layers/{n}/mlp/{x}/{kind}"),)
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
QK_NORM = (
    Rule(ATTN + "q_norm.weight", "layers/{n}/attn/q_norm/weight"),
    Rule(ATTN + "k_norm.weight", "layers/{n}/attn/k_norm/weight"),
)
BEFORE = (
    Rule(LAYER + "input_layernorm.{kind}", "layers/{n}/attn_norm/{kind}"),
    Rule(LAYER + "post_attention_layernorm.{kind}", "layers/{n}/mlp_norm/{kind}"),
)
AFTER = (
    Rule(LAYER + "post_attention_layernorm.weight", "layers/{n}/attn_post_norm/weight"),
    Rule(
        LAYER + "post_feedforward_layernorm.weight", "layers/{n}/mlp_post_norm/weight"
    ),
)
AROUND = (
    Rule(LAYER + "input_layernorm.weight", "layers/{n}/attn_norm/weight"),
    Rule(LAYER + "post_attention_layernorm.weight", "layers/{n}/attn_post_norm/weight"),
    Rule(LAYER + "pre_feedforward_layernorm.weight", "layers/{n}/mlp_norm/weight"),
    Rule(
        LAYER + "post_feedforward_layernorm.weight", "layers/{n}/mlp_post_norm/weight"
    ),
)
IGNORED = (ATTN + "rotary_emb.inv_freq",)
"""Buffers that old versions of transformers stored."""

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
"""Experts stored one by one."""
