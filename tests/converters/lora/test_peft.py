"""Adapter folders against PEFT itself: read, written, and accounted for by field."""

import json
import re
import shutil
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file

import dew
from dew.converters.folder.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from dew.converters.lora.peft import EXPERTS, READ_AS_EXPERTS
from dew.converters.lora.peft_config import FIELDS
from dew.nn.linear import FACTORS
from dew.tree import flatten, unflatten
from tests.converters.families.decoders import TINY
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS

pytestmark = [
    # PEFT asks transformers by a name that is going away.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    # Of a Conv1D PEFT finds out by itself how it lies, and says so.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]

FUSED = ("gpt2", "falcon", "phi3", "gpt_neox")
FEW = ("llama", "gemma2", "qwen2", *FUSED)
FAMILIES = [
    pytest.param(name, marks=() if name in FEW[:5] else pytest.mark.full)
    for name in TINY
]
IDS = hf.tokens(2, 24)
# PEFT takes stacked experts and their router for linear in some classes; we never do.
MIXTURE = r"\.mlp\.(gate|experts|shared_experts)\b"


def base_folder(family: str, folder: Path, **changes: Any) -> Path:
    tiny = TINY[family]
    model = hf.build(tiny.config(**{**tiny.fields, **changes}), make=tiny.model)
    return hf.save(model, folder / "base")


def moved(source: Any, seed: int = 0) -> Any:
    """The adapter after some training, saved modules included."""
    leaves, draw = flatten(source.variables), np.random.default_rng(seed)
    for path, leaf in leaves.items():
        if path[0] == "params" and source.is_trained(path):
            size = 0.2 if path[-1] in FACTORS else 0.05
            noise = draw.normal(0, size, leaf.shape)
            leaves[path] = leaf + jnp.asarray(noise, leaf.dtype)
    return replace(source, variables=unflatten(leaves))


def in_peft(base: Path, adapter: Path) -> Any:
    model = hf.reloaded(base)
    return PeftModel.from_pretrained(model, adapter).eval()


def made_by_peft(base: Path, folder: Path, **settings: Any) -> Any:
    """An adapter that PEFT made, with values in B, and its model."""
    model = hf.reloaded(base)
    settings = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings}
    model = get_peft_model(model, LoraConfig(**settings)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                size = 0.2 if "lora_" in name else 0.05
                parameter.add_(torch.randn_like(parameter) * size)
    model.save_pretrained(str(folder))
    return model


def adapt(base: Path, **settings: Any) -> Any:
    return dew.adapt(
        dew.load(base), dew.Lora(**{"rank": 4, **settings}), key=jax.random.key(0)
    )


@dataclass(frozen=True)
class Saved:
    """An adapter of ours over all linear maps of a tiny model, and where it went."""

    family: str
    folder: Path

    @cached_property
    def source(self) -> Any:
        base = base_folder(self.family, self.folder)
        exclude = EXPERTS if self.family in READ_AS_EXPERTS else ()
        source = moved(adapt(base, alpha=6.0, targets="all-linear", exclude=exclude))
        dew.save(source, self.folder / "adapter")
        dew.save(source, self.folder / "merged", merge=True)
        return source

    @cached_property
    def logits(self) -> np.ndarray:
        return hf.logits_op_by_op(self.source, IDS)


@pytest.fixture(scope="module")
def all_saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    return {n: Saved(n, tmp_path_factory.mktemp(n)) for n in TINY}


@pytest.fixture
def saved(request: pytest.FixtureRequest, all_saved: dict[str, Saved]) -> Saved:
    return all_saved[request.param]


@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
def test_peft_says_of_our_folder_what_we_do(saved: Saved) -> None:
    want = saved.logits
    theirs = in_peft(saved.folder / "base", saved.folder / "adapter")
    got = hf.torch_logits(theirs, IDS)
    assert hf.largest_difference(got, want) <= LOGITS
    plain = hf.torch_logits(theirs.unload(), IDS)
    assert hf.largest_difference(plain, want) > 0.1


@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
def test_a_merged_export_says_what_the_unmerged_model_does(saved: Saved) -> None:
    want = saved.logits
    got = hf.torch_logits(hf.reloaded(saved.folder / "merged"), IDS)
    assert hf.largest_difference(got, want) <= LOGITS


@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
def test_our_folder_comes_back_as_the_same_function(saved: Saved) -> None:
    want = saved.logits
    again = dew.load(saved.folder / "adapter")
    got = hf.logits_op_by_op(again, IDS)
    assert hf.largest_difference(got, want) <= LOGITS
    dew.save(again, saved.folder / "again")
    first, second = (
        load_file(saved.folder / name / ADAPTER_WEIGHTS)
        for name in ("adapter", "again")
    )
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


# PEFT's own mapping of merged experts names a module that all-linear does not take.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
def test_all_linear_means_the_modules_that_it_means_to_peft(saved: Saved) -> None:
    ours = {*saved.source.parts}
    model = hf.reloaded(saved.folder / "base")
    theirs = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    head, tail = "base_model.model.", ".lora_A.default"
    names = {
        name.removeprefix(head).removesuffix(tail)
        for name, _ in theirs.named_modules()
        if name.endswith(tail)
    }
    assert ours <= names
    assert all(re.search(MIXTURE, name) for name in names - ours)


ATTENTION = r".*\.self_attn\.(q|v)_proj"
SETTINGS = {
    "list": {"target_modules": ["q_proj", "o_proj"], "use_rslora": True},
    "regex": {"target_modules": ATTENTION, "exclude_modules": r".*\.0\..*"},
    "all": {"target_modules": "all-linear", "init_lora_weights": "gaussian"},
    "patterns": {
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 2, "down_proj": 3},
        "alpha_pattern": {r"layers\.1\..*": 5},
        "use_rslora": True,
    },
    "head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]},
    "table": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
}
TIED = {
    "target_modules": ["v_proj"],
    "modules_to_save": ["embed_tokens"],
    "ensure_weight_tying": True,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    return base_folder("llama", folder, tie_word_embeddings=True)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_folder_of_pefts_says_here_what_it_says_there(
    llama: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    theirs = made_by_peft(llama, tmp_path, **settings)
    ours = dew.load(tmp_path)
    got = hf.logits_op_by_op(ours, IDS)
    assert hf.largest_difference(got, hf.torch_logits(theirs, IDS)) <= LOGITS
    dew.save(ours, tmp_path / "again")
    again = in_peft(llama, tmp_path / "again")
    got = hf.torch_logits(again, IDS)
    np.testing.assert_array_equal(got, hf.torch_logits(theirs, IDS))


def test_a_tied_table_is_trained_where_both_its_uses_move(
    tied: Path, tmp_path: Path
) -> None:
    theirs = made_by_peft(tied, tmp_path / "theirs", **TIED)
    ours = dew.load(tmp_path / "theirs")
    want = hf.torch_logits(theirs, IDS)
    assert hf.largest_difference(hf.logits_op_by_op(ours, IDS), want) <= LOGITS
    dew.save(ours, tmp_path / "ours")
    got = hf.torch_logits(in_peft(tied, tmp_path / "ours"), IDS)
    np.testing.assert_array_equal(got, want)
    dew.save(ours, tmp_path / "merged", merge=True)
    merged = hf.torch_logits(hf.reloaded(tmp_path / "merged"), IDS)
    assert hf.largest_difference(merged, want) <= LOGITS


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_tied_table_that_torch_would_split_is_refused(
    tied: Path, tmp_path: Path
) -> None:
    made_by_peft(tied, tmp_path, **{**TIED, "ensure_weight_tying": False})
    with pytest.raises(ValueError, match=r"two tables where the base has one"):
        dew.load(tmp_path)


@pytest.mark.parametrize("family", FUSED[:2])
def test_a_fused_matrix_of_pefts_keeps_its_one_a(family: str, tmp_path: Path) -> None:
    base = base_folder(family, tmp_path)
    theirs = made_by_peft(base, tmp_path / "theirs", target_modules="all-linear")
    ours = dew.load(tmp_path / "theirs")
    want = hf.torch_logits(theirs, IDS)
    assert hf.largest_difference(hf.logits_op_by_op(ours, IDS), want) <= LOGITS
    dew.save(ours, tmp_path / "ours")
    first, second = (
        load_file(tmp_path / n / ADAPTER_WEIGHTS) for n in ("theirs", "ours")
    )
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_the_config_says_what_peft_needs(llama: Path, tmp_path: Path) -> None:
    source = adapt(llama, targets=("q_proj", "v_proj"), to_save=("lm_head",))
    dew.save(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / ADAPTER_CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(llama)
    assert (config["task_type"], config["peft_type"]) == ("CAUSAL_LM", "LORA")
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert config["modules_to_save"] == ["lm_head"]
    assert (config["r"], config["lora_alpha"]) == (4, 8)


def test_a_filter_of_our_paths_chooses_as_well(tmp_path: Path) -> None:
    """Of GPT-2's fused matrix the queries alone, in the second block alone."""
    base = base_folder("gpt2", tmp_path)
    source = adapt(base, targets=lambda path: path[2:5] == ("1", "attn", "q"))
    source = moved(source)
    assert list(source.parts) == ["transformer.h.1.attn.c_attn"]
    dew.save(source, tmp_path / "out")
    got = hf.torch_logits(in_peft(base, tmp_path / "out"), IDS)
    want = hf.logits_op_by_op(source, IDS)
    assert hf.largest_difference(got, want) <= LOGITS


def test_every_field_of_pefts_config_is_accounted_for() -> None:
    unknown = {f.name for f in fields(LoraConfig)} - {*FIELDS}
    assert not unknown


OTHER = {
    "use_dora": True,
    "bias": "all",
    "layers_to_transform": [0],
    "init_lora_weights": "pissa",
    "lora_bias": True,
    "target_parameters": ["mlp.experts"],
    "trainable_token_indices": [1],
    "layer_replication": [[0, 1]],
    "peft_type": "ADALORA",
    "eva_config": {"rho": 2.0},
    "use_bdlora": {"nblocks": 2},
    "r": "8",
    "sparse": True,
    "target_modules": None,
}


@pytest.mark.parametrize("name", OTHER)
def test_what_is_not_reproduced_is_refused_by_name(
    llama: Path, tmp_path: Path, name: str
) -> None:
    dew.save(adapt(llama, targets=("q_proj",)), tmp_path / "out")
    file = tmp_path / "out" / ADAPTER_CONFIG
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, name: OTHER[name]}))
    with pytest.raises(ValueError, match=rf"not reproduced: .*{name}"):
        dew.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"targets": ("q_prog",)}, r"'q_prog', which is no module \(nearest: q_proj\)"),
        ({"targets": ("embed_tokens",)}, r"embed_tokens is no linear map of ours"),
        ({"targets": "q_proj"}, r"'q_proj' selects no linear map"),
        ({"targets": lambda path: False}, r"selects no linear map"),
        ({"to_save": ("lm_hed",)}, r"'lm_hed', .*nearest: lm_head"),
        ({"rank": 0}, r"rank must be >= 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_targets_that_cannot_be_are_refused(
    llama: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        adapt(llama, **settings)


def test_a_tied_head_alone_and_experts_are_not_saved(
    tied: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"lm_head.weight is tied to embed/weight"):
        adapt(tied, to_save=("lm_head",))
    base = base_folder("qwen3_moe", tmp_path)
    with pytest.raises(ValueError, match="one of a stack of experts"):
        adapt(base, to_save=("experts.0.up_proj",))


def test_modules_that_peft_would_take_for_experts_are_refused(tmp_path: Path) -> None:
    base = base_folder("deepseek_v3", tmp_path)
    with pytest.raises(ValueError, match=r"read .*mlp.down_proj.* as its experts"):
        dew.save(adapt(base), tmp_path / "out")
    dew.save(adapt(base), tmp_path / "merged", merge=True)


def test_tensors_that_do_not_fit_are_all_named(llama: Path, tmp_path: Path) -> None:
    out = dew.save(adapt(llama, targets=("q_proj",)), tmp_path / "out")
    tensors = load_file(out / ADAPTER_WEIGHTS)
    a, b, *_ = sorted(tensors)
    tensors["extra.lora_A.weight"] = tensors.pop(a)
    tensors[b] = tensors[b][:, :1].copy()
    save_file(tensors, out / ADAPTER_WEIGHTS)
    said = r"missing: .*lora_A.*\n.*unexpected: extra.*\n.*mis-shaped: .*lora_B"
    with pytest.raises(ValueError, match=said):
        dew.load(out)


def test_a_folder_without_its_base_takes_one(llama: Path, tmp_path: Path) -> None:
    out = dew.save(moved(adapt(llama)), tmp_path / "out")
    config = json.loads((out / ADAPTER_CONFIG).read_text())
    (out / ADAPTER_CONFIG).write_text(
        json.dumps({**config, "base_model_name_or_path": None})
    )
    with pytest.raises(ValueError, match=r"no base_model_name_or_path.*base="):
        dew.load(out)
    base = dew.load(llama)
    again = flatten(dew.load(out, base=base).variables)
    assert all(again[p] is leaf for p, leaf in flatten(base.variables).items())
    with pytest.raises(ValueError, match="goes with an adapter's folder"):
        dew.load(llama, base=base)


def test_what_an_adapter_cannot_be_saved_as_is_refused(
    llama: Path, tmp_path: Path
) -> None:
    base = dew.load(llama)
    with pytest.raises(ValueError, match="has no adapter to merge"):
        dew.save(base, tmp_path / "out", merge=True)
    source = adapt(llama)
    with pytest.raises(ValueError, match="go with merge=True"):
        dew.save(source, tmp_path / "out", dtype="bfloat16")
    with pytest.raises(ValueError, match="has an adapter already"):
        dew.adapt(source, dew.Lora(), key=jax.random.key(0))
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
