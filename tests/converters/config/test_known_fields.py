"""Fields of a raw config.json that no table of ours has, as transformers means them.

What its code does not read has no effect, is carried and is named; what it reads and
the native road lacks is refused there, and taken by the lowered road.
"""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dew
from dew.cli import main
from dew.converters.config import known_fields
from dew.converters.errors import UnsupportedError
from dew.converters.families import FAMILIES
from docs.generate import config_fields
from tests.converters.families.decoders import TINY
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS

INERT: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", {"use_mrope": False}),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ("qwen2", {"use_mrope": False}),
    "microsoft/Phi-4-mini-instruct": (
        "phi3",
        {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
    ),
    "openai/gpt-oss-20b": ("gpt_oss", {"initial_context_length": 4096}),
    "HuggingFaceTB/SmolLM3-3B": ("smollm3", {"pretraining_tp": 2}),
    "openai-community/gpt2": ("gpt2", {"n_ctx": 1024}),
    "gpt2 of transformers 2": (
        "gpt2",
        {"output_past": True, "gradient_checkpointing": False},
    ),
    "facebook/opt-350m": ("opt", {"output_projection": True}),
    "a trainer's": ("llama", {"quantization_config": None, "lora_alpha": 16}),
    "a typing error": ("llama", {"rms_norm_epss": 0.5}),
}
"""By the repository that has them: a family, and fields without effect in it."""

KNOWN = {"n_ctx"}
"""Those of them that our tables have, so that nothing is said."""

ROPES: Mapping[str, Mapping[str, Any]] = {
    "finetuned": {"type": "yarn", "factor": 2.0, "finetuned": True},
    "mrope_section": {"type": "default", "mrope_section": [4, 2, 2]},
    "short_mscale": {"type": "linear", "factor": 2.0, "short_mscale": 1.1},
}


def raw_folder(family: str, folder: Path, fields: Mapping[str, Any]) -> Path:
    tiny = TINY[family]
    hf.save(hf.build(tiny.config(**tiny.fields), make=tiny.model), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(fields), indent=2))
    return folder


def difference(source: Any, folder: Path) -> float:
    ids = hf.tokens(seq=24) % 48
    want = hf.torch_logits(hf.reloaded(folder), ids)
    return hf.largest_difference(source.logits(ids), want)


@pytest.mark.parametrize("name", INERT)
def test_what_transformers_does_not_read_has_no_effect_and_is_carried(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, fields = INERT[name]
    folder = raw_folder(family, tmp_path / "raw", fields)
    source = dew.load(folder, road="native")
    said = " ".join(capsys.readouterr().err.split())
    assert difference(source, folder) < LOGITS
    named = fields.keys() - KNOWN - {name for name in fields if fields[name] is None}
    assert set(source.ignored_fields) == named
    assert said.count("without effect") == bool(named)
    assert all(field in said for field in named)
    config = json.loads(
        (dew.save(source, tmp_path / "out") / "config.json").read_text()
    )
    assert {name: config[name] for name in fields} == fields


def test_a_misspelt_field_is_named_with_the_nearest_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dew.load(raw_folder("llama", tmp_path / "raw", {"rms_norm_epss": 0.5}))
    said = " ".join(capsys.readouterr().err.split())
    assert "rms_norm_epss (nearest: rms_norm_eps)" in said


@pytest.mark.parametrize("key", ROPES)
def test_keys_of_a_rope_dict_follow_the_same_rule(key: str, tmp_path: Path) -> None:
    changes = {"rope_scaling": ROPES[key], "rope_parameters": None}
    folder = raw_folder("llama", tmp_path / "raw", {**changes, "rope_theta": 1e4})
    source = dew.load(folder, road="native")
    assert source.ignored_fields == (f"rope_scaling.{key}",)
    assert difference(source, folder) < LOGITS


def test_what_transformers_reads_is_refused_natively_and_lowered_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"layer_types": ["full_attention", "full_attention"]}
    folder = raw_folder("llama", tmp_path / "raw", fields)
    with pytest.raises(UnsupportedError, match=r"layer_types = .* is read by") as error:
        dew.load(folder, road="native")
    assert "--road lowered" in str(error.value)
    assert "--ignore-fields" in str(error.value)
    source = dew.load(folder)
    assert source.road == "lowered"
    assert "takes the lowered one" in " ".join(capsys.readouterr().err.split())
    assert difference(source, folder) < LOGITS
    ignoring = dew.load(folder, ignore_fields=["layer_types"])
    assert (ignoring.road, ignoring.ignored_fields) == ("native", ("layer_types",))


def test_a_field_of_a_later_transformers_is_for_the_certificate_to_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = {"transformers_version": "99.0.0", "attention_temperature": 0.5}
    folder = raw_folder("llama", tmp_path / "raw", later)
    assert main(["verify", str(folder), "--json"]) == 0
    certificate = json.loads(capsys.readouterr().out)
    assert certificate["ignored_fields"] == ["attention_temperature"]
    dew.load(folder)
    said = " ".join(capsys.readouterr().err.split())
    assert "written by transformers 99.0.0" in said
    assert "the certificate decides" in said


def test_values_of_a_wrong_type_are_refused_on_every_road(tmp_path: Path) -> None:
    folder = raw_folder("llama", tmp_path / "raw", {"hidden_size": "many"})
    with pytest.raises(ValueError, match="hidden_size must be a int, got 'many'"):
        dew.load(folder)


def test_the_table_is_that_of_the_installed_transformers() -> None:
    recorded = json.loads(known_fields.FILE.read_text())
    assert recorded["families"].keys() == FAMILIES.keys()
    if recorded["transformers"] == version("transformers"):
        assert config_fields.table() == recorded


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_field_of_nobody_changes_nothing(family: str, tmp_path: Path) -> None:
    folder = raw_folder(family, tmp_path / "raw", {"dew_field_of_nobody": 3})
    source = dew.load(folder, road="native")
    assert source.ignored_fields == ("dew_field_of_nobody",)
    assert np.isfinite(source.logits(hf.tokens() % 48)).all()
