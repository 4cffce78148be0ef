"""`pytorch_model.bin`: turned into safetensors once, and never more than tensors."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dew
from dew.bridges import load_lowered
from dew.bridges.loading.pickles import unpickle
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS

BIN, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pickled(model: Any, folder: Path, **options: Any) -> Path:
    """The model's folder as it was before safetensors."""
    hf.save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / BIN, **options)
    return folder


def sharded(model: Any, folder: Path) -> Path:
    """The same in two files with their index."""
    tensors = torch.load(pickled(model, folder) / BIN)
    placed = {}
    for i, half in enumerate((list(tensors)[::2], list(tensors)[1::2]), 1):
        name = f"pytorch_model-{i:05d}-of-00002.bin"
        torch.save({key: tensors[key] for key in half}, folder / name)
        placed |= dict.fromkeys(half, name)
    (folder / BIN).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pickled(hf.llama(num_hidden_layers=1), tmp_path / "m")


@pytest.mark.parametrize("write", [pickled, sharded])
def test_both_roads_load_what_transformers_loads(write: Any, tmp_path: Path) -> None:
    folder = write(hf.llama(num_hidden_layers=1), tmp_path / "m")
    ids = hf.tokens()
    want = hf.torch_logits(hf.reloaded(folder), ids)
    for load in (dew.load, load_lowered):
        loaded = load(folder)
        assert hf.largest_difference(loaded.logits(ids), want) < LOGITS
        assert loaded.tokenizer is not None


def test_a_trained_model_is_exported_as_safetensors(tmp_path: Path) -> None:
    loaded = dew.load(sharded(hf.llama(num_hidden_layers=1), tmp_path / "m"))
    out = dew.save(loaded, tmp_path / "out", hf.shaken(loaded.variables))
    hf.reloaded(out)
    assert sorted(file.name for file in out.glob("*model*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_tensor_keeps_its_bits(
    tmp_path: Path, dtype: torch.dtype, old: bool
) -> None:
    whole = torch.randn(4, 6).to(dtype)
    tensors = {"a": whole, "tied": whole, "turned": whole.T, "part": whole[1:, ::2]}
    tensors |= {"scalar": whole[0, 0], "none": whole[:0], "kept": torch.arange(3)}
    torch.save(tensors, tmp_path / BIN, _use_new_zipfile_serialization=not old)
    found = load_file(unpickle(tmp_path) / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype


def test_tied_weights_of_one_storage_load_as_tied(tmp_path: Path) -> None:
    model = hf.llama(num_hidden_layers=1, tie_word_embeddings=True)
    folder = pickled(model, tmp_path / "m")
    torch.save(model.state_dict(), folder / BIN)
    loaded, ids = dew.load(folder), hf.tokens()
    assert "head" not in loaded.variables["params"]
    want = hf.torch_logits(model, ids)
    assert hf.largest_difference(loaded.logits(ids), want) < LOGITS
    hf.reloaded(dew.save(loaded, tmp_path / "out", hf.shaken(loaded.variables)))


class Bomb:
    """What a malicious file holds: reading it as any pickle writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("old", [False, True])
def test_a_file_that_would_run_code_is_refused_and_runs_none(
    folder: Path, tmp_path: Path, old: bool
) -> None:
    bomb = {"model.norm.weight": Bomb(tmp_path / "written")}
    torch.save(bomb, folder / BIN, _use_new_zipfile_serialization=not old)
    with pytest.raises(ValueError, match=r"is refused: .* GLOBAL posix\.mkdir whose"):
        dew.load(folder)
    assert not (tmp_path / "written").exists()
    # The bomb is live: read without care it goes off.
    torch.load(folder / BIN, weights_only=False)
    assert (tmp_path / "written").exists()


def test_a_plain_pickle_is_refused_and_runs_nothing(
    folder: Path, tmp_path: Path
) -> None:
    (folder / BIN).write_bytes(pickle.dumps(Bomb(tmp_path / "written"), 2))
    with pytest.raises(ValueError, match=r"m/pytorch_model\.bin is refused"):
        dew.load(folder)
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ([torch.ones(2)], "must hold tensors by name, got list"),
        ({"state_dict": {"a": torch.ones(2)}}, "'state_dict' is dict; load it in"),
        ({"a": torch.ones(2, 2).to_sparse()}, "must hold dense tensors .* 'a' is Te"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "a is torch.complex64; weights"),
    ],
)
def test_what_is_no_state_dict_is_refused(
    held: Any, told: str, folder: Path, cache: Path
) -> None:
    torch.save(held, folder / BIN)
    with pytest.raises(ValueError, match=told):
        dew.load(folder)
    assert not [file for file in cache.rglob("*") if file.suffix != ".lock"][1:]


def test_a_file_cut_short_leaves_nothing_that_looks_whole(
    folder: Path, cache: Path
) -> None:
    whole = (folder / BIN).read_bytes()
    (folder / BIN).write_bytes(whole[:-2000])
    with pytest.raises(ValueError, match="perhaps it was cut short"):
        dew.load(folder)
    assert not list(cache.rglob("*.safetensors"))
    (folder / BIN).write_bytes(whole)
    dew.load(folder)


def test_a_file_is_turned_once_and_again_when_it_changes(folder: Path) -> None:
    made = unpickle(folder) / "model.safetensors"
    first = made.stat().st_ino
    assert dew.load(folder).content_hash == dew.load(folder).content_hash
    assert made.stat().st_ino == first
    tensors = torch.load(folder / BIN)
    torch.save({name: t + 1 for name, t in tensors.items()}, folder / BIN)
    norm = dew.load(folder).variables["params"]["norm"]["weight"]
    want = (tensors["model.norm.weight"] + 1).numpy()
    np.testing.assert_array_equal(np.asarray(norm), want)


def test_stale_and_missing_files_are_told_from_those_that_count(
    tmp_path: Path,
) -> None:
    folder = sharded(hf.llama(num_hidden_layers=1), tmp_path / "m")
    (folder / "pytorch_model-00003-of-00003.bin").write_bytes(b"stale")
    dew.load(folder)
    torch.save({}, folder / BIN)
    with pytest.raises(ValueError, match="remove the one that is stale"):
        dew.load(folder)
    (folder / BIN).unlink()
    (folder / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(ValueError, match=r"names pytorch_model-00001.*, not there"):
        dew.load(folder)


def test_safetensors_beside_a_pickle_are_what_counts(folder: Path) -> None:
    model = hf.llama(seed=1, num_hidden_layers=1)
    model.save_pretrained(folder)
    ids = hf.tokens()
    want = hf.torch_logits(model, ids)
    assert hf.largest_difference(dew.load(folder).logits(ids), want) < LOGITS


def test_without_torch_the_error_says_what_to_install(folder: Path) -> None:
    script = (
        "import importlib.util, sys; real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'torch' else real(n, *a)"
        f"\nimport dew; dew.load({str(folder)!r})"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "ImportError" in run.stderr
    assert "pip install 'dew-bridge[torch]' brings them" in run.stderr
    assert "weights as pytorch_model.bin, a pickle; reading it needs" in run.stderr
