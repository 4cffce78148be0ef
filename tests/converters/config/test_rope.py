"""A config's rotary embedding rotates as in transformers, in every spelling."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from dew.converters.config.fields import Reading
from dew.converters.config.rope import RopeFields
from dew.converters.families import FAMILIES
from tests.converters.families.decoders import TINY
from tests.converters.families.grid import LAYERED, rope_cases
from tests.support import hf_models as hf
from tests.support.tolerances import ROPE

WINDOW = 64
LONG = {
    "short_factor": [1.0 + i / 8 for i in range(4)],
    "long_factor": [1.5, 2, 3, 4.0],
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 32}
TYPES: list[Mapping[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": None, **ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, **ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    {"rope_type": "llama3", **LLAMA3, **ORIGINAL},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "longrope", **LONG, **ORIGINAL},
    {"rope_type": "longrope", **LONG, **ORIGINAL, "factor": 3.0},
    {"rope_type": "longrope", **LONG, **ORIGINAL, "attention_factor": 1.1},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
]
THETAS = (1e4, 5e5, 1e7)


def spelled(facts: Mapping[str, Any], theta: float, version: int) -> dict[str, Any]:
    """The config.json of a tiny Llama, as version 4 or 5 of transformers writes it."""
    config: dict[str, Any] = {
        **hf.LLAMA,
        "head_dim": 8,
        "max_position_embeddings": WINDOW,
    }
    if version == 4:
        old = {("type" if n == "rope_type" else n): v for n, v in facts.items()}
        return {**config, "rope_theta": theta, "rope_scaling": old}
    return {**config, "rope_parameters": {**facts, "rope_theta": theta}}


def tables(rope: Any, seq: int) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = rope.tables(jnp.arange(seq, dtype=jnp.int32)[None])
    return np.asarray(cos), np.asarray(sin)


def torch_tables(
    embedding: Any, seq: int, *layer_type: str
) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = embedding(torch.zeros(1), torch.arange(seq)[None], *layer_type)
    return cos.numpy(), sin.numpy()


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("theta", THETAS)
def test_every_type_turns_as_transformers_turns_it(theta: float, version: int) -> None:
    for facts in TYPES:
        config = spelled(facts, theta, version)
        rope = FAMILIES["llama"].read(config).attention.rope
        for seq in (20, 3 * WINDOW):
            want = torch_tables(LlamaRotaryEmbedding(LlamaConfig(**config)), seq)
            np.testing.assert_allclose(tables(rope, seq), want, atol=ROPE)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": None, "rope_theta": 1e6},
        {"partial_rotary_factor": 0.5},
        {
            "original_max_position_embeddings": 16,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
        },
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        },
    ],
)
def test_where_spellings_disagree_the_one_wins_that_wins_in_transformers(
    changes: Mapping[str, Any],
) -> None:
    config = {**hf.LLAMA, "head_dim": 8, **changes}
    rope = FAMILIES["llama"].read(config).attention.rope
    copied: dict[str, Any] = {
        k: dict(v) if type(v) is dict else v for k, v in config.items()
    }
    want = torch_tables(LlamaRotaryEmbedding(LlamaConfig(**copied)), 100)
    np.testing.assert_allclose(tables(rope, 100), want, atol=ROPE)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_part_of_a_head_turns_as_transformers_turns_it(fraction: float) -> None:
    fields = RopeFields(partial=True, fraction=0.5)
    table = {**FAMILIES["llama"].fields}
    for facts in TYPES:
        if facts["rope_type"] in ("longrope", "proportional"):
            continue
        base = {k: v for k, v in hf.LLAMA.items() if k != "initializer_range"}
        size = {"hidden_size": 128, "max_position_embeddings": WINDOW}
        config: dict[str, Any] = {
            **base,
            **size,
            "rope_scaling": dict(facts),
            "rope_theta": 1e4,
        }
        config["partial_rotary_factor"] = fraction
        rope = fields.read(Reading(config=config, table=table))
        want = torch_tables(PhiRotaryEmbedding(PhiConfig(**config)), 100)
        np.testing.assert_allclose(tables(rope, 100), want, atol=ROPE)


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"rope_type": "mrope"}, "rope_type 'mrope' is none of default, dynamic"),
        ({"rope_type": "linear"}, "lacks 'factor'"),
        (
            {"rope_type": "linear", "factr": 2.0},
            "lacks 'factor'",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            "short_factor must have one number for each of the 4 pairs, got 1",
        ),
        (
            {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
            "partial_rotary_factor must be 1 for 'linear' here, got 0.5",
        ),
        ({"rope_type": "linear", "factor": "two"}, "could not convert string"),
    ],
)
def test_a_rope_we_do_not_know_is_refused(facts: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        FAMILIES["llama"].read(spelled(facts, 1e4, 5))


@pytest.mark.parametrize("family", sorted(LAYERED))
def test_each_kind_of_layer_turns_by_the_rope_that_transformers_gives_it(
    family: str,
) -> None:
    tiny = TINY[family]
    for case in rope_cases(family):
        for spelling in case.spellings:
            config: dict[str, Any] = {**tiny.fields, **case.changes, **spelling}
            attention = FAMILIES[family].read(config).attention
            model = hf.build(tiny.config.from_dict(config), make=tiny.model)
            ours = {"full": attention.rope, "sliding": attention.local_rope}
            for kind, rope in ours.items():
                want = torch_tables(
                    model.base_model.rotary_emb, 100, f"{kind}_attention"
                )
                np.testing.assert_allclose(tables(rope, 100), want, atol=ROPE)
