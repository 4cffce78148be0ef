"""Configs in the shapes of well-known checkpoints, shrunk to build in a moment.

`configs/<model_type>.json` maps a repository on the hub to a config.json in the
spelling of its time. They were written from knowledge of those files and not fetched:
no test compares them with the hub, and a value may differ. `shrunk` divides the sizes
alone.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"

LAYERS, HEADS, HEAD, VOCAB = 4, 4, 16, 128

Fields = Mapping[str, Any]

FIXED: Fields = {
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "dim"), HEADS * HEAD),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "hidden_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "ffn_hidden_size"), 24),
    "shared_expert_intermediate_size": 40,
    "vocab_size": VOCAB,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": HEAD,
    "v_head_dim": HEAD,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
}
"""Sizes that any model takes, by the field that states one."""

CAPPED: Mapping[str, int] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_hidden_groups": 1,
}
"""Largest counts."""

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers")
HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads")
PER_LAYER = ("layer_types", "no_rope_layers")


def shapes() -> dict[str, Fields]:
    """The config of every checkpoint, by `model_type: repository`."""
    return {
        f"{file.stem}: {source}": config
        for file in sorted(CONFIGS.glob("*.json"))
        for source, config in json.loads(file.read_text()).items()
    }


def shrunk(config: Fields) -> dict[str, Any]:
    """The config with four layers of four heads of 16, and a vocabulary of 128.

    Key heads and the windowed layers keep their share, a width of heads that is not
    that of the model over its heads stays so, lists have an entry for each layer and
    each rotated pair, and ids lie in the vocabulary.
    """
    small = {name: _small(name, value, config) for name, value in config.items()}
    scaling = small.get("rope_scaling")
    if scaling:
        small["rope_scaling"] = {
            key: value[: _pairs(config)] if type(value) is list else value
            for key, value in scaling.items()
        }
    return small


def _small(name: str, value: Any, config: Fields) -> Any:
    kinds: Mapping[str, Callable[[], Any]] = {
        **dict.fromkeys(DEPTHS, lambda: min(value, LAYERS)),
        **dict.fromkeys(HEAD_COUNTS, lambda: HEADS),
        **dict.fromkeys(KEY_COUNTS, lambda: max(1, HEADS * value // _heads(config))),
        **dict.fromkeys(PER_LAYER, lambda: value[:LAYERS]),
        **dict.fromkeys(
            ("embedding_size", "word_embed_proj_dim"), lambda: _embedding(value, config)
        ),
        "head_dim": lambda: _head_dim(value, config),
        "max_window_layers": lambda: value * LAYERS // _depth(config),
    }
    if value is None or type(value) is bool:
        return value
    if name in FIXED:
        return FIXED[name]
    if name in CAPPED:
        return min(value, CAPPED[name])
    if name in kinds:
        return kinds[name]()
    if name.endswith("token_id"):
        return [i % VOCAB for i in value] if type(value) is list else value % VOCAB
    return value


def _stated(config: Fields, names: tuple[str, ...]) -> int:
    return next(int(config[name]) for name in names if name in config)


def _heads(config: Fields) -> int:
    return _stated(config, HEAD_COUNTS)


def _depth(config: Fields) -> int:
    return _stated(config, DEPTHS)


def _width(config: Fields) -> int:
    return _stated(config, ("hidden_size", "n_embd", "n_embed", "dim"))


def _head_dim(value: int, config: Fields) -> int:
    return HEAD if value * _heads(config) == _width(config) else 2 * HEAD


def _embedding(value: int, config: Fields) -> int:
    return HEADS * HEAD if value == _width(config) else 24


def _pairs(config: Fields) -> int:
    return int(HEAD * config.get("partial_rotary_factor", 1.0)) // 2
