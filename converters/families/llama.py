"""Llama 1, 2, 3.x and every model of its shape (SmolLM2, Yi, TinyLlama …)."""

from dew.converters.config.fields import Inert, Quotient, Read, Same, Use
from dew.converters.config.rope import RopeFields
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import FROM_HEADS, HEADS, HEADS_BIAS, Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP

FIELDS = {
    "vocab_size": Use("vocab", 32000),
    "hidden_size": Use("embed", 4096),
    "num_hidden_layers": Use("layers", 32),
    "num_attention_heads": Use("attention.heads", 32),
    "num_key_value_heads": Use("attention.kv_heads", Same("num_attention_heads")),
    "head_dim": Use(
        "attention.head_dim", Quotient("hidden_size", "num_attention_heads")
    ),
    "attention_bias": Use(("attention.qkv_bias", "attention.out_bias"), False),
    "attention_dropout": Use("attention.dropout", 0.0),
    "intermediate_size": Use("mlp.dim", 11008),
    "hidden_act": Use("mlp.activation", "silu", among=ACTIVATIONS),
    "mlp_bias": Use("mlp.bias", False),
    "rms_norm_eps": Use("norm.eps", 1e-6),
    "tie_word_embeddings": Use("head.tied", False),
    "initializer_range": Use("init_std", 0.02),
    "max_position_embeddings": Read(2048),
    "pretraining_tp": Inert(1),
    "rope_interleaved": Inert(False),
}

LAYER = "model.layers.{n}."
ATTN = LAYER + "self_attn."
RULES = (
    Rule("model.embed_tokens.weight", "embed/weight"),
    Rule(ATTN + "q_proj.weight", "layers/{n}/attn/q/weight", HEADS),
    Rule(ATTN + "q_proj.bias", "layers/{n}/attn/q/bias", HEADS_BIAS),
    Rule(ATTN + "k_proj.weight", "layers/{n}/attn/k/weight", HEADS),
    Rule(ATTN + "k_proj.bias", "layers/{n}/attn/k/bias", HEADS_BIAS),
    Rule(ATTN + "v_proj.weight", "layers/{n}/attn/v/weight", HEADS),
    Rule(ATTN + "v_proj.bias", "layers/{n}/attn/v/bias", HEADS_BIAS),
    Rule(ATTN + "o_proj.weight", "layers/{n}/attn/o/weight", FROM_HEADS),
    Rule(ATTN + "o_proj.bias", "layers/{n}/attn/o/bias"),
    Rule(LAYER + "mlp.{x}_proj.{kind}", "layers/{n}/mlp/{x}/{kind}"),
    Rule(LAYER + "input_layernorm.weight", "layers/{n}/attn_norm/weight"),
    Rule(LAYER + "post_attention_layernorm.weight", "layers/{n}/mlp_norm/weight"),
    Rule("model.norm.weight", "norm/weight"),
    Rule("lm_head.weight", "head/weight"),
)

LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    rules=RULES,
    copies=(TIED_HEAD,),
    ignored=(ATTN + "rotary_emb.inv_freq",),
)
