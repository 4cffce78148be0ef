"""Quantised folders: refused unless asked for, and then what their scales say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import dew
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 24], "fmt": "e4m3"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEW_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf.save(hf.llama(num_hidden_layers=1), tmp_path / "m")


def blocks_of(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scale of every entry, by a loop over blocks."""
    whole = torch.empty(shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            whole[16 * i : 16 * (i + 1), 24 * j : 24 * (j + 1)] = scale[i, j]
    return whole


def in_float8(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Quantises the layers' matrices in place; returns what they stand for."""
    tensors = load_file(folder / "model.safetensors")
    stored, plain = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            stored[name] = plain[name] = tensor
            continue
        shape = {
            "block": (-(-tensor.shape[0] // 16), -(-tensor.shape[1] // 24)),
            "channel": (tensor.shape[0], 1),
            "tensor": (1,),
        }[kind]
        scale = torch.rand(shape) + 0.01
        whole = blocks_of(scale, tensor.shape) if kind == "block" else scale
        stored[name] = (tensor / whole).to(torch.float8_e4m3fn)
        end = "_scale_inv" if kind == "block" else "_scale"
        stored[name + end] = scale
        plain[name] = stored[name].float() * whole
        if kind == "tensor":
            stored[name.replace("weight", "input_scale")] = torch.ones(1)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    method = FP8 if kind == "block" else {"quant_method": "compressed-tensors"}
    hf.edit_config(folder, quantization_config=method, dtype="float32")
    return plain


@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_float8_is_its_number_times_its_scale(folder: Path, kind: str) -> None:
    plain = in_float8(folder, kind)
    with pytest.raises(ValueError, match=r"is quantised .*dew\.load with dequantise="):
        dew.load(folder)
    loaded = dew.load(folder, dequantise=True)
    found = load_file(loaded.folder.path / "model.safetensors")
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert "quantization_config" not in loaded.config
    assert loaded.tokenizer is not None


def test_a_dequantised_model_answers_and_is_exported_plain(
    folder: Path, tmp_path: Path
) -> None:
    plain = in_float8(folder, "block")
    loaded, ids = dew.load(folder, dequantise=True), hf.tokens()
    model = hf.llama(num_hidden_layers=1)
    model.load_state_dict(plain)
    want = hf.torch_logits(model, ids)
    assert hf.largest_difference(loaded.logits(ids), want) < LOGITS
    out = dew.save(loaded, tmp_path / "out", hf.shaken(loaded.variables))
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    hf.reloaded(out)


def test_the_result_is_rounded_once_to_the_dtype_of_the_config(folder: Path) -> None:
    plain = in_float8(folder, "block")
    hf.edit_config(folder, dtype="bfloat16")
    found = load_file(
        dew.load(folder, dequantise=True).folder.path / "model.safetensors"
    )
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[name], plain[name].bfloat16())


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    fields: dict[str, Any] = {**hf.LLAMA, "head_dim": 8, "hidden_size": 32}
    config = transformers.GptOssConfig(
        **{**fields, "intermediate_size": 32},
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=8,
    )
    model = hf.build(config)
    folder = hf.save(model, tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    want = dict(stored)
    rng = np.random.default_rng(0)
    for name in [n for n in stored if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        packed = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        blocks = torch.from_numpy(packed)
        scales = torch.from_numpy(rng.integers(118, 126, packed.shape[:3], np.uint8))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wide = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        want[name] = wide
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    hf.edit_config(folder, quantization_config=method, dtype="float32")
    loaded = dew.load(folder, dequantise=True)
    found = load_file(loaded.folder.path / "model.safetensors")
    assert all(torch.equal(found[name], want[name]) for name in want)
    model.load_state_dict(want)
    ids = hf.tokens()
    difference = hf.largest_difference(loaded.logits(ids), hf.torch_logits(model, ids))
    assert difference < LOGITS


def test_what_cannot_be_dequantised_is_refused_by_name(folder: Path) -> None:
    hf.edit_config(folder, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ValueError, match=r"with 'awq', and only fp8, compressed-tens"):
        dew.load(folder, dequantise=True)
    in_float8(folder, "block")
    hf.edit_tensors(folder, {"model.layers.0.mlp.up_proj.weight_scale_inv": None})
    fault = r"up_proj\.weight is F8_E4M3 and has no .*up_proj\.weight_scale_inv"
    with pytest.raises(ValueError, match=fault):
        dew.load(folder, dequantise=True)


def test_a_plain_folder_stays_itself(folder: Path) -> None:
    assert dew.load(folder, dequantise=True).folder.path == folder
