"""Values of config.json as they stand on disk mean what they mean to transformers.

From raw JSON: every field left out or null, every activation, every other name of a
field, and rotary embeddings in the spelling of either version, in both and at odds. The
config object of transformers is made from the file, so its own conversions count.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import CONFIG_MAPPING, AutoConfig

import dew
from dew.converters.config.fields import MultiUse, Use
from dew.converters.errors import UnsupportedError
from dew.converters.families import FAMILIES
from tests.converters.config.test_fields import REFUSALS, logits_apart, text
from tests.converters.families.decoders import TINY
from tests.support import hf_models as hf
from tests.support.sampling import daily_sample
from tests.support.tolerances import LOGITS

Changes = Mapping[str, Any]
"""Fields of a config.json: new values, or `GONE` for a field that is left out."""

GONE = object()

KEPT = {"architectures", "dtype", "model_type", "torch_dtype", "transformers_version"}
"""Fields that say what the file is: other tests change them."""

LINEAR = {"type": "linear", "factor": 2.0}

ROPES: Mapping[str, Changes] = {
    "v4": {"rope_parameters": GONE, "rope_theta": 500.0},
    "v4, int": {"rope_parameters": GONE, "rope_theta": 500},
    "v4, null": {"rope_parameters": GONE, "rope_theta": None},
    "v4, no theta": {"rope_parameters": GONE, "rope_scaling": LINEAR},
    "v4, scaled": {
        "rope_parameters": GONE,
        "rope_theta": 500.0,
        "rope_scaling": LINEAR,
    },
    "v4, scaling null": {
        "rope_parameters": GONE,
        "rope_theta": 500.0,
        "rope_scaling": None,
    },
    "v4, two types": {
        "rope_parameters": GONE,
        "rope_theta": 500.0,
        "rope_scaling": {**LINEAR, "rope_type": "dynamic"},
    },
    "both, other theta": {"rope_theta": 77.0},
    "both, other scaling": {"rope_scaling": LINEAR},
    "both, v5 null": {"rope_parameters": None, "rope_theta": 500.0},
    "both, v5 empty": {"rope_parameters": {}, "rope_theta": 500.0},
    "v5, no theta": {"rope_parameters": {"rope_type": "default"}},
    "v5, no type": {"rope_parameters": {"rope_theta": 300.0}},
    "part of a head": {"partial_rotary_factor": 0.5},
    "part of a head, by percent": {"rotary_pct": 0.5},
}
"""Spellings of a rotary embedding, by what is odd about them."""


def changes(family: str, raw: Changes) -> Iterator[tuple[str, Changes]]:
    table, defaults = FAMILIES[family].fields, CONFIG_MAPPING[family]()
    for name in sorted({*raw, *table} - KEPT):
        default = getattr(defaults, name, None)
        # A width or depth of a real model would only be slow.
        is_large = isinstance(default, int) and default > 3 * (raw.get(name) or 1)
        if name in raw and not is_large:
            yield f"{name} left out", {name: GONE}
        yield f"{name} null", {name: None}
        entry = table.get(name)
        use = entry.uses[0] if isinstance(entry, MultiUse) else entry
        for choice in use.choices if isinstance(use, Use) else ():
            yield f"{name} {choice}", {name: choice}
    for other, name in CONFIG_MAPPING[family].attribute_map.items():
        if name in raw:
            yield f"{other} for {name}", {other: raw[name], name: GONE}
    if "rope_theta" in (raw.get("rope_parameters") or {}):
        yield from ROPES.items()


def said_by_torch(folder: Path, make: Any, like: Any) -> Any:
    """The model of a raw config with the weights of `like`; None if torch refuses."""
    try:
        config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
        model = hf.build(config, make=make)
        shapes = {name: t.shape for name, t in model.state_dict().items()}
        if shapes == {name: t.shape for name, t in like.state_dict().items()}:
            model.load_state_dict(like.state_dict())
        hf.torch_logits(model, text(0))
        return model
    except REFUSALS:
        return None


SAMPLE = daily_sample("raw values", TINY, 2)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full)
        for name in sorted(TINY)
    ],
)
def test_a_raw_config_means_what_it_means_to_transformers(
    family: str, tmp_path: Path
) -> None:
    tiny = TINY[family]
    like = hf.build(tiny.config(**tiny.fields), make=tiny.model)
    like.save_pretrained(tmp_path / "base")
    raw = json.loads((tmp_path / "base" / "config.json").read_text())
    base, unchanged = FAMILIES[family].read(raw), hf.torch_logits(like, text(0))
    wrong, tried = [], 0
    for index, (name, change) in enumerate(changes(family, raw)):
        folder = tmp_path / str(index)
        folder.mkdir()
        edited = {n: x for n, x in {**raw, **change}.items() if x is not GONE}
        (folder / "config.json").write_text(json.dumps(edited))
        model = said_by_torch(folder, tiny.model, like)
        if model is None:
            continue
        tried += 1
        found = verdict(family, base, unchanged, model, edited, folder)
        wrong += [] if found is None else [f"{name}: {found}"]
    assert not wrong
    assert tried > 20


def verdict(
    family: str,
    base: Any,
    unchanged: np.ndarray,
    model: Any,
    raw: Changes,
    folder: Path,
) -> str | None:
    """What is wrong with our reading of a raw config; None where nothing is."""
    try:
        parsed = FAMILIES[family].read(raw)
    except UnsupportedError:
        return None  # The lowered road takes it, which reads it by transformers.
    if parsed == base:
        want = hf.torch_logits(model, text(0))
        is_same = want.shape == unchanged.shape and (
            hf.largest_difference(want, unchanged) < LOGITS
        )
        return None if is_same else "counts as inert, and torch's logits moved"
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    difference = logits_apart(dew.load(folder, road="native"), model)
    return None if difference < LOGITS else f"differs by {difference}"


def test_gemma_with_gelu_has_its_tanh_form(tmp_path: Path) -> None:
    tiny = TINY["gemma"]
    folder = hf.save(hf.build(tiny.config(**tiny.fields)), tmp_path / "gemma")
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    raw |= {"hidden_act": "gelu", "hidden_activation": None}
    file.write_text(json.dumps(raw))
    source = dew.load(folder, road="native")
    ids = hf.tokens(seq=24) % 48
    want = hf.torch_logits(hf.reloaded(folder), ids)
    assert hf.largest_difference(source.logits(ids), want) < LOGITS
    written = json.loads(
        (dew.save(source, tmp_path / "out") / "config.json").read_text()
    )
    assert written["hidden_act"] == "gelu"


@pytest.mark.parametrize(
    ("family", "alias", "name"),
    [
        ("bloom", "n_embed", "hidden_size"),
        ("bloom", "num_attention_heads", "n_head"),
        ("gpt2", "num_attention_heads", "n_head"),
        ("distilbert", "num_attention_heads", "n_heads"),
        ("gpt_oss", "num_experts", "num_local_experts"),
        ("qwen3_moe", "num_local_experts", "num_experts"),
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_of_two_names_at_odds_the_one_that_transformers_follows_counts(
    family: str, alias: str, name: str, is_last: bool, tmp_path: Path
) -> None:
    raw = {"model_type": family, name: 8, alias: 16}
    raw = raw if is_last else dict(reversed(raw.items()))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert getattr(AutoConfig.from_pretrained(tmp_path), name) == 16
    alone = FAMILIES[family].read({"model_type": family, name: 16})
    assert FAMILIES[family].read(raw) == alone
