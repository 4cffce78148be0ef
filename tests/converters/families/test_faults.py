"""Every family: a fault in any of its tensors or rules is caught and named."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dew
from dew.converters.families import FAMILIES
from dew.converters.mapping.build import build_table
from dew.converters.mapping.table import rule_path
from tests.converters.families.decoders import TINY
from tests.converters.families.measure import model_of
from tests.support import hf_models as hf
from tests.support.sampling import daily_random

KINDS = ("removed", "added", "mis-shaped", "doubled")


def save_model(family: str, folder: Path) -> Path:
    model_of(family, {}).save_pretrained(folder)
    return folder


def spoil(folder: Path, kind: str, name: str) -> str:
    """Spoils a tensor in the way of `kind`; returns the expected error message."""
    tensor = load_file(folder / "model.safetensors")[name]
    quoted = re.escape(name)
    if kind == "removed":
        hf.edit_tensors(folder, {name: None})
        return f"missing: {quoted}"
    if kind == "added":
        hf.edit_tensors(folder, {f"{name}_too": tensor})
        return f"unexpected: {quoted}_too"
    if kind == "mis-shaped":
        hf.edit_tensors(folder, {name: torch.cat([tensor, tensor[:1]])})
        return f"mis-shaped: {quoted} is"
    double(folder, name, tensor)
    return f"doubled: {quoted} is in"


def double(folder: Path, name: str, tensor: torch.Tensor) -> None:
    """Makes two shards of the file, both of which hold the tensor."""
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / first)
    save_file({name: tensor}, folder / second, metadata={"format": "pt"})
    shard_of = dict.fromkeys(names, first) | {name: second}
    index = json.dumps({"metadata": {}, "weight_map": shard_of})
    (folder / "model.safetensors.index.json").write_text(index)


def check_spoiled(folder: Path, copy: Path, kind: str, name: str) -> None:
    shutil.copytree(folder, copy)
    fault = spoil(copy, kind, name)
    with pytest.raises(ValueError, match=fault):
        dew.load(copy)
    shutil.rmtree(copy)


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_seeded_tensor_cannot_be_spoiled_unseen(family: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path / "m")
    names = sorted(load_file(folder / "model.safetensors"))
    rng = daily_random(family)
    for kind in KINDS:
        check_spoiled(folder, tmp_path / "copy", kind, rng.choice(names))


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(TINY))
def test_no_tensor_can_be_spoiled_unseen(family: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path / "m")
    for name in load_file(folder / "model.safetensors"):
        for kind in KINDS:
            check_spoiled(folder, tmp_path / "copy", kind, name)


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_rule_too_few_or_too_many_fails_when_the_table_is_built(
    family: str, tmp_path: Path
) -> None:
    rules = FAMILIES[family].rules
    table = dew.load(save_model(family, tmp_path)).table
    assert table is not None
    targets = [rule_path(path) for path in table.variables]
    for i, rule in enumerate(rules):
        bound = [target for target in targets if rule.binds(target) is not None]
        for target in bound[:1]:
            with pytest.raises(ValueError, match=f"{target} has no rule"):
                build_table(rules[:i] + rules[i + 1 :], table.variables)
            with pytest.raises(ValueError, match=f"{target} has 2 rules"):
                build_table((*rules, rule), table.variables)
