"""GGUF architectures with LayerNorm: GPT-2, BLOOM, Falcon, Phi 2 and others."""

from dataclasses import replace

from dew.converters.config.fields import Values
from dew.converters.gguf.rows import (
    ALWAYS,
    ATTENTION,
    BLOCK,
    ENDS,
    MLP,
    NEVER,
    NO_BIAS,
    NORMS,
    QK_NORMS,
    SILU,
    SIZES,
    Arch,
    Facts,
    TensorRow,
    group_by_kv,
    transpose_matrix,
    with_all,
    with_interleaved_rope,
)


def _four_times(facts: Facts, config: Values) -> Values:
    """Checks an MLP four times as wide as the model, fixed in the config class."""
    wide, embed = facts.get("feed_forward_length"), config["hidden_size"]
    if wide not in (None, 4 * embed):
        raise ValueError(
            f"feed_forward_length must be 4 times embedding_length {embed}, got {wide}"
        )
    return {}


def _gpt2(facts: Facts, config: Values) -> Values:
    # None is four times the width in the config class, and all checkpoints have None.
    is_usual = config["n_inner"] == 4 * config["n_embd"]
    return {"n_inner": None if is_usual else config["n_inner"]}


def _bloom(facts: Facts, config: Values) -> Values:
    heads = config["n_head"]
    if facts.get("attention.head_count_kv", heads) != heads:
        raise ValueError(f"attention.head_count_kv must be head_count, {heads}")
    return _four_times(facts, config)


def _falcon(facts: Facts, config: Values) -> Values:
    order = facts.get("tensor_data_layout", "jploski")
    if order != "jploski":
        raise ValueError(f"tensor_data_layout must be 'jploski', got {order!r}")
    is_new = config["num_kv_heads"] != 1
    return {
        **_four_times(facts, config),
        "new_decoder_architecture": is_new,
        "multi_query": not is_new,
        "ffn_hidden_size": 4 * config["hidden_size"],
    }


def _stablelm(facts: Facts, config: Values) -> Values:
    # llama.cpp decides by the tensors alone, and so do the rows: the key is redundant.
    facts.get("use_parallel_residual")
    return {}


def _phi2(facts: Facts, config: Values) -> Values:
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise ValueError(
            "attention.head_count_kv must be head_count, as the converter writes it "
            f"for all, got {config['num_key_value_heads']}"
        )
    return {}


def _gpt_neox(facts: Facts, config: Values) -> Values:
    """Spells RoPE as this class does; older files do not state the residual."""
    return {
        "use_parallel_residual": facts.get("use_parallel_residual", True),
        "rotary_pct": config["partial_rotary_factor"],
        "rotary_emb_base": config["rope_theta"],
    }


def _olmo(facts: Facts, config: Values) -> Values:
    # The class fixes the norm's epsilon, and llama.cpp's 0 means no clamp.
    if facts.get("attention.layer_norm_epsilon") not in (None, 1e-5):
        raise ValueError("attention.layer_norm_epsilon must be 1e-05")
    return {"clip_qkv": facts.get("attention.clamp_kqv", 0.0) or None}


_LAYER_NORM = "attention.layer_norm_epsilon"
GPT2 = Arch(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    rows={
        "token_embd": TensorRow(to="transformer.wte"),
        "position_embd": TensorRow(to="transformer.wpe"),
        "output_norm": TensorRow(to="transformer.ln_f", bias=ALWAYS),
        "output": ENDS["output"],
        **with_all(
            {
                "blk.{n}.attn_norm": TensorRow(to="transformer.h.{n}.ln_1"),
                "blk.{n}.ffn_norm": TensorRow(to="transformer.h.{n}.ln_2"),
                "blk.{n}.attn_qkv": TensorRow(to="transformer.h.{n}.attn.c_attn"),
                "blk.{n}.attn_output": TensorRow(to="transformer.h.{n}.attn.c_proj"),
                "blk.{n}.ffn_up": TensorRow(to="transformer.h.{n}.mlp.c_fc"),
                "blk.{n}.ffn_down": TensorRow(to="transformer.h.{n}.mlp.c_proj"),
            },
            layout=transpose_matrix,
            bias=ALWAYS,
        ),
    },
    fields={
        "block_count": "n_layer",
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        _LAYER_NORM: "layer_norm_epsilon",
    },
    constants={"activation_function": "gelu_new"},
    rope=False,
    finish=_gpt2,
)
BLOOM = Arch(
    model_type="bloom",
    class_name="BloomForCausalLM",
    rows={
        "token_embd": TensorRow(to="transformer.word_embeddings"),
        "output": ENDS["output"],
        **with_all(
            {
                "token_embd_norm": TensorRow(
                    to="transformer.word_embeddings_layernorm"
                ),
                "output_norm": TensorRow(to="transformer.ln_f"),
                "blk.{n}.attn_norm": TensorRow(to="transformer.h.{n}.input_layernorm"),
                "blk.{n}.ffn_norm": TensorRow(
                    to="transformer.h.{n}.post_attention_layernorm"
                ),
                "blk.{n}.attn_output": TensorRow(
                    to="transformer.h.{n}.self_attention.dense"
                ),
                "blk.{n}.ffn_up": TensorRow(to="transformer.h.{n}.mlp.dense_h_to_4h"),
                "blk.{n}.ffn_down": TensorRow(to="transformer.h.{n}.mlp.dense_4h_to_h"),
                "blk.{n}.attn_qkv": TensorRow(
                    to="transformer.h.{n}.self_attention.query_key_value",
                    layout=group_by_kv,
                ),
            },
            bias=ALWAYS,
        ),
    },
    fields={
        "block_count": "n_layer",
        "context_length": "seq_length",
        "embedding_length": "hidden_size",
        "attention.head_count": "n_head",
        _LAYER_NORM: "layer_norm_epsilon",
    },
    rope=False,
    finish=_bloom,
)
_FALCON_BLOCK = "transformer.h.{n}."
FALCON = Arch(
    model_type="falcon",
    class_name="FalconForCausalLM",
    rows={
        "token_embd": TensorRow(to="transformer.word_embeddings"),
        "output_norm": TensorRow(to="transformer.ln_f", bias=ALWAYS),
        "output": ENDS["output"],
        "blk.{n}.attn_norm": TensorRow(
            to=_FALCON_BLOCK + "input_layernorm", bias=ALWAYS
        ),
        "blk.{n}.attn_qkv": TensorRow(
            to=_FALCON_BLOCK + "self_attention.query_key_value", layout=group_by_kv
        ),
        "blk.{n}.attn_output": TensorRow(to=_FALCON_BLOCK + "self_attention.dense"),
        "blk.{n}.ffn_up": TensorRow(to=_FALCON_BLOCK + "mlp.dense_h_to_4h"),
        "blk.{n}.ffn_down": TensorRow(to=_FALCON_BLOCK + "mlp.dense_4h_to_h"),
    },
    fields={
        **{k: v for k, v in SIZES.items() if k != "feed_forward_length"},
        "attention.head_count_kv": "num_kv_heads",
        _LAYER_NORM: "layer_norm_epsilon",
    },
    constants={
        "alibi": False,
        "bias": False,
        "parallel_attn": True,
        "num_ln_in_parallel_attn": 1,
    },
    finish=_falcon,
)
FALCON_TWO_NORMS = replace(
    FALCON,
    rows={
        **FALCON.rows,
        "blk.{n}.attn_norm": TensorRow(to=_FALCON_BLOCK + "ln_mlp", bias=ALWAYS),
        "blk.{n}.attn_norm_2": TensorRow(to=_FALCON_BLOCK + "ln_attn", bias=ALWAYS),
    },
    constants={**FALCON.constants, "num_ln_in_parallel_attn": 2},
)
STARCODER2 = Arch(
    model_type="starcoder2",
    class_name="Starcoder2ForCausalLM",
    rows={
        **ENDS,
        "output_norm": TensorRow(to="model.norm", bias=ALWAYS),
        **with_all(NORMS, bias=ALWAYS),
        **with_all(ATTENTION, bias="use_bias"),
        "blk.{n}.ffn_up": TensorRow(to=BLOCK + "mlp.c_fc", bias="use_bias"),
        "blk.{n}.ffn_down": TensorRow(to=BLOCK + "mlp.c_proj", bias="use_bias"),
    },
    fields={**SIZES, _LAYER_NORM: "norm_epsilon"},
    constants={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
)
STABLELM = Arch(
    model_type="stablelm",
    class_name="StableLmForCausalLM",
    rows={
        **ENDS,
        "output_norm": TensorRow(to="model.norm", bias=ALWAYS),
        "blk.{n}.attn_norm": TensorRow(to=BLOCK + "input_layernorm", bias=ALWAYS),
        "blk.{n}.ffn_norm": TensorRow(
            to=BLOCK + "post_attention_layernorm",
            weight="!use_parallel_residual",
            bias="!use_parallel_residual",
        ),
        **{
            stem: replace(row, bias=NEVER if "output" in stem else "use_qkv_bias")
            for stem, row in ATTENTION.items()
        },
        "blk.{n}.attn_q_norm": TensorRow(
            to=BLOCK + "self_attn.q_layernorm.norms.{e}", weight="qk_layernorm"
        ),
        "blk.{n}.attn_k_norm": TensorRow(
            to=BLOCK + "self_attn.k_layernorm.norms.{e}", weight="qk_layernorm"
        ),
        **MLP,
    },
    fields={**SIZES, _LAYER_NORM: "layer_norm_eps"},
    constants=SILU,
    partial_rotary=True,
    finish=_stablelm,
)
COHERE = Arch(
    model_type="cohere",
    class_name="CohereForCausalLM",
    rows={
        "token_embd": ENDS["token_embd"],
        "output_norm": ENDS["output_norm"],
        "blk.{n}.attn_norm": NORMS["blk.{n}.attn_norm"],
        **ATTENTION,
        **with_all(QK_NORMS, weight="use_qk_norm"),
        **MLP,
    },
    fields={**SIZES, _LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"},
    constants={"tie_word_embeddings": True, **NO_BIAS},
)
PHI2 = Arch(
    model_type="phi",
    class_name="PhiForCausalLM",
    rows={
        "token_embd": ENDS["token_embd"],
        **with_all(
            {
                "output_norm": TensorRow(to="model.final_layernorm"),
                "output": TensorRow(to="lm_head"),
                "blk.{n}.attn_norm": TensorRow(to=BLOCK + "input_layernorm"),
                **ATTENTION,
                "blk.{n}.attn_output": TensorRow(to=BLOCK + "self_attn.dense"),
                "blk.{n}.ffn_up": TensorRow(to=BLOCK + "mlp.fc1"),
                "blk.{n}.ffn_down": TensorRow(to=BLOCK + "mlp.fc2"),
            },
            bias=ALWAYS,
        ),
    },
    fields={**SIZES, _LAYER_NORM: "layer_norm_eps"},
    constants={
        "tie_word_embeddings": False,
        "hidden_act": "gelu_new",
        "qk_layernorm": False,
    },
    partial_rotary=True,
    finish=_phi2,
)
_NEOX_BLOCK = "gpt_neox.layers.{n}."
GPT_NEOX = Arch(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    rows={
        "token_embd": TensorRow(to="gpt_neox.embed_in"),
        "output": TensorRow(to="embed_out", weight="!tie_word_embeddings"),
        **with_all(
            {
                "output_norm": TensorRow(to="gpt_neox.final_layer_norm"),
                "blk.{n}.attn_norm": TensorRow(to=_NEOX_BLOCK + "input_layernorm"),
                "blk.{n}.ffn_norm": TensorRow(
                    to=_NEOX_BLOCK + "post_attention_layernorm"
                ),
                "blk.{n}.attn_qkv": TensorRow(
                    to=_NEOX_BLOCK + "attention.query_key_value",
                    layout=group_by_kv,
                ),
                "blk.{n}.attn_output": TensorRow(to=_NEOX_BLOCK + "attention.dense"),
                "blk.{n}.ffn_up": TensorRow(to=_NEOX_BLOCK + "mlp.dense_h_to_4h"),
                "blk.{n}.ffn_down": TensorRow(to=_NEOX_BLOCK + "mlp.dense_4h_to_h"),
            },
            bias=ALWAYS,
        ),
    },
    fields={
        **{k: v for k, v in SIZES.items() if k != "attention.head_count_kv"},
        _LAYER_NORM: "layer_norm_eps",
    },
    constants={"attention_bias": True, "hidden_act": "gelu"},
    partial_rotary=True,
    omitted=("rope_theta", "partial_rotary_factor"),
    finish=_gpt_neox,
)
OLMO = Arch(
    model_type="olmo",
    class_name="OlmoForCausalLM",
    rows={
        "token_embd": ENDS["token_embd"],
        "output": ENDS["output"],
        **with_interleaved_rope(ATTENTION),
        **MLP,
    },
    fields=SIZES,
    constants=NO_BIAS,
    finish=_olmo,
)
