"""Whatever is wrong with a folder is named, all of it in one error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dew
from dew.converters.load import load_native
from tests.support import hf_models as hf

SHARDED = {"max_shard_size": "12KB"}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = hf.llama(num_hidden_layers=1)
    return hf.save(model, tmp_path_factory.mktemp("single") / "m")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "m"
    hf.save(hf.llama(num_hidden_layers=1), folder, **SHARDED)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def copy(single: Path, tmp_path: Path) -> Path:
    return shutil.copytree(single, tmp_path / "copy")


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded, tmp_path / "shards")


def index_of(folder: Path) -> dict[str, str]:
    text = (folder / "model.safetensors.index.json").read_text()
    return json.loads(text)["weight_map"]


def write_index(folder: Path, placed: dict[str, str]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": placed})
    (folder / "model.safetensors.index.json").write_text(text)


def test_every_tensor_is_missed_by_name(copy: Path, single: Path) -> None:
    for name, tensor in load_file(single / "model.safetensors").items():
        hf.edit_tensors(copy, {name: None})
        with pytest.raises(ValueError, match=f"missing: {name}"):
            dew.load(copy)
        hf.edit_tensors(copy, {name: tensor})


def test_every_misshapen_tensor_is_named_with_both_shapes(
    copy: Path, single: Path
) -> None:
    tensors = load_file(single / "model.safetensors")
    longer = {n: torch.cat([t, t[:1]]) for n, t in tensors.items()}
    hf.edit_tensors(copy, longer)
    with pytest.raises(ValueError, match="mis-shaped") as error:
        dew.load(copy)
    for name, tensor in tensors.items():
        fault = f"{name} is {list(longer[name].shape)} in the file, and the model wants"
        assert f"{fault} {list(tensor.shape)}" in str(error.value)


def test_an_unexpected_tensor_is_named_with_the_nearest_name(copy: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    hf.edit_tensors(copy, {name: torch.zeros(32)})
    nearest = "nearest: model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ValueError, match=rf"unexpected: {name} \({nearest}\)"):
        dew.load(copy)


def test_old_rotary_buffers_are_ignored_and_survive(copy: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    hf.edit_tensors(copy, {name: torch.arange(4.0)})
    out = dew.save(dew.load(copy), tmp_path / "out")
    assert torch.equal(load_file(out / "model.safetensors")[name], torch.arange(4.0))


def test_a_doubled_tensor_is_named_with_both_files(shards: Path) -> None:
    placed = index_of(shards)
    name = "model.norm.weight"
    other = next(file for file in placed.values() if file != placed[name])
    tensors = load_file(shards / other) | {name: torch.ones(32)}
    save_file(tensors, shards / other, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"doubled: {name} is in .*{placed[name]}"):
        dew.load(shards)


def test_a_tensor_in_another_shard_than_the_index_says_is_named(shards: Path) -> None:
    placed = index_of(shards)
    name = "model.norm.weight"
    other = next(file for file in placed.values() if file != placed[name])
    write_index(shards, placed | {name: other})
    with pytest.raises(ValueError, match=f"places {name} in {other}, but it is in"):
        dew.load(shards)


def test_a_shard_that_the_index_names_and_nobody_has_is_named(shards: Path) -> None:
    lost = index_of(shards)["model.norm.weight"]
    (shards / lost).unlink()
    with pytest.raises(ValueError, match=f"names {lost}, which is missing.*norm"):
        dew.load(shards)


def test_stale_shards_beside_an_index_are_not_opened(shards: Path) -> None:
    (shards / "model-00009-of-00009.safetensors").write_bytes(b"no header at all")
    assert dew.load(shards).logits(hf.tokens()).shape == (2, 40, hf.VOCAB)


def test_an_index_cannot_reach_outside_its_folder(shards: Path) -> None:
    write_index(shards, index_of(shards) | {"model.norm.weight": "../x.safetensors"})
    with pytest.raises(ValueError, match=r"files beside it, got \.\./x\.safetensors"):
        dew.load(shards)


def test_a_single_file_and_an_index_that_disagree_are_refused(shards: Path) -> None:
    save_file({"x": torch.ones(1)}, shards / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds both model\.safetensors and an model"):
        dew.load(shards)


def cut(data: bytes) -> bytes:
    return data[:-10]


def lengthen(data: bytes) -> bytes:
    return data + b"\0" * 10


def shift(data: bytes) -> bytes:
    return data.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1)


def misname(data: bytes) -> bytes:
    return data.replace(b'"model.norm.weight"', b'"model.norm.weighs"', 1)


def double(data: bytes) -> bytes:
    return data.replace(b"k_proj", b"q_proj", 1)


def spoil(data: bytes) -> bytes:
    return data[:8] + b"[" + data[9:]


def empty(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (cut, "is cut short: its tensors end at byte"),
        (lengthen, "10 bytes that belong to no tensor"),
        (shift, "its offsets span"),
        (misname, r"unexpected: model.norm.weighs \(nearest: model.norm.weight\)"),
        (double, "names model.layers.0.self_attn.q_proj.weight twice"),
        (spoil, "the header is not JSON"),
        (empty, "is no safetensors file: 0 bytes hold no header"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(
    copy: Path, damage: Callable[[bytes], bytes], fault: str
) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=fault):
        dew.load(copy)


def test_an_fp8_tensor_is_refused_with_advice(copy: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    hf.edit_tensors(copy, {name: torch.zeros(48, 32).to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match=f"{name} is F8_E4M3: quantised; load the unq"):
        dew.load(copy)


def test_a_quantised_config_is_refused_with_advice(copy: Path) -> None:
    hf.edit_config(copy, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=r"is quantised \(gptq\).*dequantise it"):
        dew.load(copy)


def test_a_pickled_folder_says_what_turns_it(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only pytorch_model\.bin, a pickle"):
        load_native(copy)


def test_a_folder_that_is_no_model_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"not a Hugging Face folder.*it holds a\.txt"):
        dew.load(tmp_path)


def test_an_address_that_leads_nowhere_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        dew.load(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(ValueError, match="neither here nor to be had from"):
        dew.load("nobody/nothing")


def test_an_unknown_architecture_names_the_known_ones(copy: Path) -> None:
    hf.edit_config(copy, model_type="lama")
    with pytest.raises(
        ValueError, match=r"no family for model_type 'lama' \(nearest: ll"
    ):
        dew.load(copy, road="native")
    hf.edit_config(
        copy, model_type="llama", architectures=["LlamaForTokenClassification"]
    )
    with pytest.raises(
        ValueError, match="architectures must be one of LlamaForCausalLM"
    ):
        dew.load(copy, road="native")


def test_a_run_without_an_export_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="is a run without an export; make one"):
        dew.load(tmp_path)


def test_a_run_stands_for_its_export(single: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    shutil.copytree(single, tmp_path / "export")
    assert dew.load(tmp_path).content_hash == dew.load(single).content_hash
