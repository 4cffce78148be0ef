"""A Llama folder gives transformers' logits, and comes out as it went in."""

import filecmp
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dew
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(hf.llama(head_dim=16), tmp_path_factory.mktemp("llama"))


def test_logits_equal_those_of_transformers(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = hf.tokens()
    got = dew.load(folder).logits(ids)
    assert hf.largest_difference(got, hf.torch_logits(model, ids)) < LOGITS


def test_an_untouched_export_keeps_every_byte(folder: Path, tmp_path: Path) -> None:
    out = dew.save(dew.load(folder), tmp_path / "out")
    names = sorted(file.name for file in folder.iterdir())
    assert sorted(file.name for file in out.iterdir()) == names
    others = [name for name in names if not name.endswith(".safetensors")]
    assert filecmp.cmpfiles(folder, out, others, shallow=False)[0] == others
    before, after = (load_file(f / "model.safetensors") for f in (folder, out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.numpy().tobytes() == after[name].numpy().tobytes()


def test_our_own_file_loads_without_a_copy(folder: Path, tmp_path: Path) -> None:
    source = dew.load(dew.save(dew.load(folder), tmp_path / "out"))
    embed = source.variables["params"]["embed"]["weight"]
    stored = source.folder.weights.view("model.embed_tokens.weight")
    assert embed.unsafe_buffer_pointer() == stored.ctypes.data


def test_a_trained_export_has_our_logits_in_transformers(
    folder: Path, tmp_path: Path
) -> None:
    source = dew.load(folder)
    trained = hf.shaken(source.variables)
    out = dew.save(source, tmp_path / "out", trained)
    model = hf.reloaded(out)
    ids = hf.tokens()
    ours = replace(source, variables=trained).logits(ids)
    assert hf.largest_difference(ours, hf.torch_logits(model, ids)) < LOGITS
