"""Folders in every form: dtypes, shards, prefixes, addresses, devices."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dew
from dew.converters.folder.atomic import write_atomically
from dew.source import Source
from dew.tree import flatten, unflatten
from tests.support import hf_models as hf
from tests.support.tolerances import ATOL, LOGITS

NORM = ("params", "norm", "weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(
        hf.llama(num_hidden_layers=1), tmp_path_factory.mktemp("files") / "m"
    )


def stored_as(folder: Path, target: Path, dtypes: dict[str, torch.dtype]) -> Path:
    """The folder with tensors cast; the key "" is the dtype of all others."""
    dew.save(dew.load(folder), target)
    tensors = load_file(target / "model.safetensors")
    cast = {n: t.to(dtypes.get(n, dtypes[""])) for n, t in tensors.items()}
    save_file(cast, target / "model.safetensors", metadata={"format": "pt"})
    return target


def bits(folder: Path) -> dict[str, tuple[Any, bytes]]:
    """Dtype and bytes of every tensor of a folder."""
    found = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            found[name] = (tensor.dtype, raw)
    return found


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_its_bits(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    source = stored_as(folder, tmp_path / "m", {"": dtype})
    loaded = dew.load(source)
    assert bits(dew.save(loaded, tmp_path / "out")) == bits(source)
    moved = jax.tree.map(lambda leaf: leaf + 0, loaded.variables)
    if dtype != torch.float64:
        assert bits(dew.save(loaded, tmp_path / "moved", moved)) == bits(source)


def test_bfloat16_is_loaded_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    source = stored_as(folder, tmp_path / "m", {"": torch.bfloat16})
    leaf = dew.load(source).variables["params"]["norm"]["weight"]
    assert leaf.dtype == jax.numpy.bfloat16
    assert np.asarray(leaf).tobytes() == bits(source)["model.norm.weight"][1]


def test_float32_masters_go_back_to_each_stored_dtype(
    folder: Path, tmp_path: Path
) -> None:
    mixed = {"": torch.bfloat16, "model.norm.weight": torch.float32}
    source = stored_as(folder, tmp_path / "m", mixed)
    loaded = dew.load(source, dtype="float32")
    leaves = jax.tree.leaves(loaded.variables)
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}
    moved = jax.tree.map(lambda leaf: leaf + 0, loaded.variables)
    assert bits(dew.save(loaded, tmp_path / "out", moved)) == bits(source)


def test_an_export_in_another_dtype_says_so_in_its_config(
    folder: Path, tmp_path: Path
) -> None:
    out = dew.save(dew.load(folder), tmp_path / "out", dtype="bfloat16")
    model = hf.reloaded(out)
    assert model.config.dtype == model.dtype == torch.bfloat16
    want = {n: t.bfloat16() for n, t in load_file(folder / "model.safetensors").items()}
    assert all(
        torch.equal(t, want[n]) for n, t in load_file(out / "model.safetensors").items()
    )


def test_a_value_that_the_stored_dtype_cannot_hold_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    loaded = dew.load(stored_as(folder, tmp_path / "m", {"": torch.float16}))
    large = jax.tree.map(lambda leaf: leaf.astype("float32") * 1e6, loaded.variables)
    with pytest.raises(ValueError, match="more than float16 can; write it in another"):
        dew.save(loaded, tmp_path / "out", large)
    assert os.listdir(tmp_path) == ["m"]


def test_variables_of_another_model_are_refused_by_name(
    folder: Path, tmp_path: Path
) -> None:
    loaded = dew.load(folder)
    leaves = flatten(loaded.variables)
    del leaves[NORM]
    leaves["params", "extra"] = leaves["params", "embed", "weight"]
    leaves["params", "head", "weight"] = leaves["params", "head", "weight"][1:]
    wrong = unflatten(leaves)
    fault = r"missing: norm/weight; unexpected: extra; head/weight is \[96, 32\]"
    with pytest.raises(ValueError, match=fault):
        dew.save(loaded, tmp_path / "out", wrong)


def test_shards_come_out_as_they_went_in(tmp_path: Path) -> None:
    source = hf.save(hf.llama(), tmp_path / "m", max_shard_size="20KB")
    loaded = dew.load(source)
    for variables in (None, hf.shaken(loaded.variables)):
        out = dew.save(loaded, tmp_path / "out", variables, overwrite=True)
        index = "model.safetensors.index.json"
        assert (out / index).read_bytes() == (source / index).read_bytes()
        for file in source.glob("*.safetensors"):
            assert load_file(file).keys() == load_file(out / file.name).keys()
    hf.reloaded(out)


def test_shards_are_filled_to_the_size_asked_for(folder: Path, tmp_path: Path) -> None:
    out = dew.save(dew.load(folder), tmp_path / "out", max_shard_size="16KB")
    files = sorted(out.glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 20_000 for file in files)
    assert bits(out) == bits(folder)
    hf.reloaded(out)
    with pytest.raises(ValueError, match="be bytes or like \"5GB\", got '5 apples'"):
        dew.save(dew.load(folder), tmp_path / "o", max_shard_size="5 apples")


def test_written_files_are_plain(folder: Path, tmp_path: Path) -> None:
    out = dew.save(dew.load(folder), tmp_path / "out")
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    header = int.from_bytes((out / "model.safetensors").read_bytes()[:8], "little")
    assert (8 + header) % 64 == 0


@pytest.mark.parametrize(
    ("body", "spelled"), [("", "base"), ("language_model.model.", "wrapped")]
)
def test_only_declared_prefixes_are_read(
    tmp_path: Path, body: str, spelled: str
) -> None:
    model = hf.llama(num_hidden_layers=1, tie_word_embeddings=True)
    folder = hf.save(model, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", body, 1): t for name, t in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    if spelled == "wrapped":
        with pytest.raises(ValueError, match=r"prefixes of this family: 'model\.', ''"):
            dew.load(folder)
        return
    loaded, ids = dew.load(folder), hf.tokens()
    assert (
        hf.largest_difference(loaded.logits(ids), hf.torch_logits(model, ids)) < LOGITS
    )
    assert bits(dew.save(loaded, tmp_path / "out")) == bits(folder)


def test_masks_and_positions_mean_what_they_mean_in_torch(folder: Path) -> None:
    model, loaded = hf.reloaded(folder), dew.load(folder)
    ids = hf.tokens()
    for padded in (np.s_[:, :7], np.s_[:, -7:]):
        mask = np.ones_like(ids)
        mask[padded] = 0
        real = mask.astype(bool)
        want = hf.torch_logits(model, ids, mask)[real]
        assert hf.largest_difference(loaded.logits(ids, mask)[real], want) < LOGITS
    far = np.broadcast_to(np.arange(40) + 100, ids.shape)
    with torch.no_grad():
        want = model(torch.tensor(ids), position_ids=torch.tensor(far)).logits.numpy()
    assert hf.largest_difference(loaded.logits(ids, None, far), want) < LOGITS


def test_the_folder_comes_along(folder: Path) -> None:
    loaded = dew.load(folder)
    assert loaded.road == "native"
    assert loaded.eos_ids == (2, 5)
    assert loaded.chat_template == "{{ messages[0].content }}"
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("w3 w4").ids == [3, 4]
    assert loaded.config["model_type"] == "llama"


def test_a_url_of_any_file_system_loads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEW_CACHE", str(tmp_path / "cache"))
    fsspec.filesystem("memory").put(str(folder), "memory://bucket/m", recursive=True)
    loaded = dew.load("memory://bucket/m")
    assert loaded.content_hash == dew.load(folder).content_hash
    assert loaded.address == "memory://bucket/m"
    with pytest.raises(ValueError, match="memory://bucket/none holds no files"):
        dew.load("memory://bucket/none")


def test_a_hub_id_loads_from_the_cache_of_the_hub(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    dew.save(dew.load(folder), snapshot)
    script = (
        "import dew; print([dew.load(a).content_hash for a in "
        "('org/tiny', 'hf://org/tiny', 'hf://org/tiny@main')])"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str([dew.load(folder).content_hash] * 3)


def test_the_hash_knows_the_tensors_and_not_their_sharding(
    folder: Path, tmp_path: Path
) -> None:
    loaded = dew.load(folder)
    sharded = dew.load(dew.save(loaded, tmp_path / "a", max_shard_size="8KB"))
    assert sharded.content_hash == loaded.content_hash
    moved = dew.load(dew.save(loaded, tmp_path / "b", hf.shaken(loaded.variables)))
    assert moved.content_hash != loaded.content_hash


def test_each_device_is_given_its_part(folder: Path) -> None:
    mesh = jax.make_mesh((8,), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.P("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())

    def place(path: Any, shape: Any) -> jax.sharding.Sharding:
        return spread if path[-2] in ("gate", "up") else whole

    loaded = dew.load(folder, shardings=place)
    gate = loaded.variables["params"]["layers"]["0"]["mlp"]["gate"]["weight"]
    assert {shard.data.shape for shard in gate.addressable_shards} == {(6, 32)}
    plain, ids = dew.load(folder), hf.tokens()
    np.testing.assert_allclose(
        loaded.logits(ids), plain.logits(ids), atol=ATOL["stored"]
    )
    tree = jax.tree.map(lambda leaf: leaf.sharding, loaded.variables)
    again = dew.load(folder, shardings=tree)
    assert jax.tree.map(lambda leaf: leaf.sharding, again.variables) == tree


MESH = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))


def spread(shape: tuple[int, ...]) -> jax.sharding.Sharding:
    """Cuts the first axis that eight devices share evenly."""
    cut = [size % 8 == 0 for size in shape]
    axes = ["x" if i == cut.index(True) else None for i in range(len(shape))]
    return jax.sharding.NamedSharding(MESH, jax.P(*axes))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_no_tensor_is_ever_whole_on_one_device(name: str, tmp_path: Path) -> None:
    sizes = {**hf.LLAMA, "num_hidden_layers": 1, "vocab_size": 96}
    experts = {"num_local_experts": 8} if name == "mixtral" else {}
    kind = {"llama": transformers.LlamaConfig, "mixtral": transformers.MixtralConfig}
    folder = hf.save(hf.build(kind[name](**sizes, **experts)), tmp_path / "m")
    table = dew.load(folder).table
    shapes = table.variables
    tensors = {*shapes.values(), *table.shapes.values()}
    old = {id(array) for array in jax.live_arrays()}
    whole: list[tuple[int, ...]] = []

    def look() -> None:
        new = [array for array in jax.live_arrays() if id(array) not in old]
        held = [array for array in new if array.sharding.is_fully_replicated]
        whole.extend(array.shape for array in held if array.shape in tensors)

    def place(path: Any, shape: Any) -> jax.sharding.Sharding:
        look()
        return spread(shapes[path])

    loaded = dew.load(folder, shardings=place)
    moved = jax.tree.map(lambda leaf: leaf + 0, loaded.variables)
    out = dew.save(loaded, tmp_path / "out", moved, check=lambda partial: look())
    assert whole == []
    assert bits(out) == bits(folder)


def test_sharded_variables_are_written_whole(folder: Path, tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.P("x"))
    loaded = dew.load(folder)
    leaves = jax.tree.map(
        lambda leaf: jax.device_put(leaf, spread) if leaf.shape[0] % 8 == 0 else leaf,
        loaded.variables,
    )
    assert bits(dew.save(loaded, tmp_path / "out", leaves)) == bits(folder)


def test_an_interrupted_export_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    loaded = dew.load(folder)

    def interrupt(partial: Path) -> None:
        assert (partial / "config.json").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dew.save(loaded, tmp_path / "out", check=interrupt)
    assert not list(tmp_path.iterdir())


def test_a_failed_export_keeps_what_stood_there(folder: Path, tmp_path: Path) -> None:
    loaded = dew.load(folder)
    out = dew.save(loaded, tmp_path / "out")

    def fail(partial: Path) -> None:
        raise ValueError("the certificate failed")

    with pytest.raises(ValueError, match="the certificate failed"):
        dew.save(loaded, out, hf.shaken(loaded.variables), overwrite=True, check=fail)
    assert bits(out) == bits(folder)
    assert os.listdir(tmp_path) == ["out"]


def test_only_earlier_exports_and_empty_folders_are_replaced(
    folder: Path, tmp_path: Path
) -> None:
    loaded = dew.load(folder)
    (tmp_path / "out").mkdir()
    out = dew.save(loaded, tmp_path / "out")
    with pytest.raises(
        ValueError, match="exists and is not an earlier certified export"
    ):
        dew.save(loaded, out)
    (out / "certificate.json").write_text("{}")
    assert not (dew.save(loaded, out) / "certificate.json").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder"):
        dew.save(loaded, tmp_path / "file", overwrite=True)


def test_a_model_may_be_written_over_the_folder_it_came_from(
    folder: Path, tmp_path: Path
) -> None:
    here = dew.save(dew.load(folder), tmp_path / "m")
    loaded = dew.load(here)
    trained = hf.shaken(loaded.variables)
    dew.save(loaded, here, trained, overwrite=True)
    ids = hf.tokens()
    want = replace(loaded, variables=trained).logits(ids)
    np.testing.assert_array_equal(dew.load(here).logits(ids), want)


def test_what_was_never_a_folder_cannot_be_saved(folder: Path, tmp_path: Path) -> None:
    plain = Source(model=dew.load(folder).model)

    class Task:
        source = plain
        variables = None

    with pytest.raises(
        TypeError, match=r"a model that dew\.load returned, got a Source"
    ):
        dew.save(Task(), tmp_path / "out")


def test_a_model_card_names_the_source_and_its_licence(
    folder: Path, tmp_path: Path
) -> None:
    source = dew.save(dew.load(folder), tmp_path / "m")
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    loaded = dew.load(source)
    out = dew.save(loaded, tmp_path / "out", hf.shaken(loaded.variables))
    card = (out / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert f"# Trained from {source}" in card
    untouched = dew.save(loaded, tmp_path / "untouched")
    assert (untouched / "README.md").read_text().endswith("# Tiny\n")


def test_staging_survives_a_target_in_a_new_place(tmp_path: Path) -> None:
    with write_atomically(tmp_path / "a" / "b") as partial:
        (partial / "x").write_text("x")
        assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "b" / "x").read_text() == "x"
