"""From a folder by the lowered road, and out again."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.torch import load_file
from transformers import AlbertForMaskedLM, BertModel, ViTForImageClassification

from dew.bridges import load_lowered
from dew.bridges.loading.load import fill_meta_module
from dew.bridges.loading.meta import meta_module
from dew.bridges.names import flat_weights
from dew.converters.pretrained import Pretrained
from dew.converters.save import export
from examples.support.weights import cached
from tests.bridges.lowering import zoo
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(hf.llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Pretrained:
    return load_lowered(folder)


def test_a_folder_gives_torchs_logits(folder: Path, loaded: Pretrained) -> None:
    ids = hf.tokens()
    want = hf.torch_logits(hf.reloaded(folder), ids)
    assert hf.largest_difference(loaded.logits(ids), want) < LOGITS
    assert loaded.road == "lowered"
    assert loaded.tokenizer is not None


def test_an_export_without_training_keeps_every_byte(
    loaded: Pretrained, folder: Path, tmp_path: Path
) -> None:
    out = export(loaded, tmp_path / "out")
    held = hf.reloaded(folder).state_dict()
    for name, tensor in hf.reloaded(out).state_dict().items():
        assert torch.equal(tensor, held[name])
    assert (out / "notes.txt").read_bytes() == (folder / "notes.txt").read_bytes()


def test_a_trained_export_loads_in_transformers(
    loaded: Pretrained, tmp_path: Path
) -> None:
    variables = hf.shaken(loaded.variables)
    out = export(loaded, tmp_path / "out", variables)
    ids = hf.tokens(2, 8)
    ours = loaded.model.apply(variables, {"tokens": ids}).logits
    gap = hf.largest_difference(
        np.asarray(ours), hf.torch_logits(hf.reloaded(out), ids)
    )
    assert gap < LOGITS


def test_a_dtype_is_of_the_weights_and_not_of_what_torch_recomputes(
    folder: Path,
) -> None:
    half = load_lowered(folder, dtype=jnp.bfloat16)
    leaves = jax.tree.leaves(half.variables)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    model: Any = half.model
    assert model.fixed["model.rotary_emb.inv_freq"].dtype == np.float32


def test_weights_go_where_the_shardings_say(folder: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    spread = NamedSharding(mesh, PartitionSpec(None))
    loaded = load_lowered(folder, shardings=lambda path, shape: spread)
    assert all(
        len(x.sharding.device_set) == 2 for x in jax.tree.leaves(loaded.variables)
    )


def test_torch_reads_the_arrays_own_memory(folder: Path, loaded: Pretrained) -> None:
    model: Any = loaded.model
    config = hf.reloaded(folder).config
    module = meta_module(type(hf.reloaded(folder)), config, torch.float32, ())
    assert all(weight.is_meta for weight in module.parameters())
    fill_meta_module(module, model)
    array = loaded.variables["params"]["model"]["norm"]["weight"]
    assert module.model.norm.weight.data_ptr() == array.unsafe_buffer_pointer()


def test_a_family_that_transformers_renames_loads_by_its_stored_names(
    tmp_path: Path,
) -> None:
    model: Any = zoo.ZOO["vit"].build()
    model.save_pretrained(tmp_path / "vit")
    loaded = load_lowered(tmp_path / "vit")
    assert any("encoder.layer" in name for name in loaded.table.sources)
    out = export(loaded, tmp_path / "out", hf.shaken(loaded.variables))
    reload: Any = ViTForImageClassification.from_pretrained
    _, report = reload(out, output_loading_info=True)
    assert not any(report.values())


def test_missing_and_foreign_tensors_are_named(folder: Path, tmp_path: Path) -> None:
    bad = hf.save(hf.llama(), tmp_path / "bad")
    hf.edit_tensors(
        bad, {"model.norm.weight": None, "model.extra.weight": torch.zeros(2)}
    )
    with pytest.raises(
        ValueError, match=r"missing: model\.norm.*\n.*unexpected: model\.extra"
    ):
        load_lowered(bad)


def test_a_tied_copy_that_differs_is_refused(tmp_path: Path) -> None:
    bad = hf.save(hf.llama(tie_word_embeddings=True), tmp_path / "bad")
    hf.edit_tensors(bad, {"lm_head.weight": torch.zeros(hf.VOCAB, 32)})
    with pytest.raises(ValueError, match="to which the config ties it"):
        load_lowered(bad)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_stored_apart_load_merged_and_go_out_apart(
    name: str, tmp_path: Path
) -> None:
    model: Any = zoo.ZOO[name].build()
    model.save_pretrained(tmp_path / "apart")
    stored = load_file(tmp_path / "apart" / "model.safetensors")
    assert any(".experts.1." in tensor for tensor in stored)
    loaded = load_lowered(tmp_path / "apart", check=False)
    held = flat_weights(loaded.variables)
    for weight, tensor in model.state_dict().items():
        np.testing.assert_array_equal(held[weight], tensor)
    out = export(loaded, tmp_path / "same")
    same = load_file(out / "model.safetensors")
    assert all(torch.equal(same[tensor], stored[tensor]) for tensor in stored)
    moved = hf.shaken(loaded.variables)
    again = hf.reloaded(export(loaded, tmp_path / "moved", moved)).state_dict()
    for weight, array in flat_weights(moved).items():
        np.testing.assert_array_equal(again[weight], np.asarray(array))


def test_an_architecture_nobody_knows_is_refused(tmp_path: Path) -> None:
    bad = hf.edit_config(hf.save(hf.llama(), tmp_path / "bad"), architectures=["No"])
    with pytest.raises(ValueError, match=r"must name an architecture.*got \['No'\]"):
        load_lowered(bad)


def test_a_model_type_of_another_architecture_is_refused(tmp_path: Path) -> None:
    bad = hf.edit_config(hf.save(hf.llama(), tmp_path / "bad"), model_type="lama")
    with pytest.raises(ValueError, match=r"model_type must be 'llama'.*got 'lama'"):
        load_lowered(bad)


@pytest.mark.full
def test_a_real_albert_gives_torchs_scores(tmp_path: Path) -> None:
    model: Any = AlbertForMaskedLM.from_pretrained(cached("albert")).eval()
    model.save_pretrained(tmp_path / "albert")
    loaded = load_lowered(tmp_path / "albert")
    ids = np.random.default_rng(0).integers(12, 500, (2, 32))
    want = hf.torch_logits(model, ids)
    assert hf.largest_difference(loaded.logits(ids), want) < LOGITS
    # Its twelve layers are one, lowered twelve times over the same weights.
    lowered: Any = loaded.model
    assert lowered.num_blocks == 12


@pytest.mark.full
def test_a_real_minilm_gives_torchs_hidden_states() -> None:
    folder = cached("minilm")
    loaded = load_lowered(folder)
    model: Any = BertModel.from_pretrained(folder).eval()
    ids = np.random.default_rng(0).integers(1000, 30000, (2, 32))
    got = loaded.model.apply(loaded.variables, {"tokens": ids}).final
    with torch.no_grad():
        want = model(torch.tensor(ids)).last_hidden_state.numpy()
    assert hf.largest_difference(np.asarray(got), want) < LOGITS


@pytest.mark.full
def test_a_real_smollm2_gives_torchs_logits(smollm2: Path) -> None:
    loaded = load_lowered(smollm2)
    ids = np.array([[504, 3575, 282, 4649, 314]])
    want = hf.torch_logits(hf.reloaded(smollm2), ids)
    got = loaded.logits(ids)
    assert hf.largest_difference(got, want) < LOGITS
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode([int(got[0, -1].argmax())]) == " Paris"
