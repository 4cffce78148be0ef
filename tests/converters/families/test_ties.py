"""Tied heads of every family, in all combinations of config and file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dew
from dew.converters.families import FAMILIES
from dew.tree import flatten
from tests.converters.families.decoders import TINY
from tests.converters.families.measure import model_of
from tests.support import hf_models as hf
from tests.support.sampling import daily_random
from tests.support.tolerances import LOGITS

LOADS = ((True, "absent"), (True, "equal"), (False, "equal"), (False, "different"))
REFUSED = ((True, "different"), (False, "absent"))
FLAG = "tie_word_embeddings"


def folder_of(family: str, folder: Path, tied: bool, head: str) -> tuple[Path, str]:
    """A folder with this config flag and stored head, and the head's name."""
    model_of(family, {FLAG: False}).save_pretrained(folder)
    copies = [copy for copy in FAMILIES[family].copies if copy.flag == FLAG]
    stored = load_file(folder / "model.safetensors")
    for copy in copies:
        rules = FAMILIES[family].rules
        origin = next(rule.source for rule in rules if rule.target == copy.target)
        embed = stored[origin]
        kinds = {"absent": None, "equal": embed.clone(), "different": embed + 1}
        hf.edit_tensors(folder, {copy.source: kinds[head]})
    return hf.edit_config(folder, **{FLAG: tied}), copies[0].source


def tables_of(source: Any) -> int:
    """Number of matrices with a row for each token."""
    leaves = flatten(source.variables["params"]).values()
    return sum(leaf.ndim == 2 and leaf.shape[0] == hf.VOCAB for leaf in leaves)


def check_cell(family: str, folder: Path, tied: bool, head: str) -> None:
    source_folder, name = folder_of(family, folder / "in", tied, head)
    if (tied, head) in REFUSED:
        message = rf'{name}.*tied="stored".*tied="config"'
        with pytest.raises(ValueError, match=message):
            dew.load(source_folder)
        return
    source = dew.load(source_folder)
    assert tables_of(source) == (1 if tied else 2)
    out = dew.save(source, folder / "out")
    before, after = (load_file(f / "model.safetensors") for f in (source_folder, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    model, ids = hf.reloaded(out), hf.tokens(1, 16) % (hf.VOCAB - 1)
    got = hf.logits_op_by_op(source, ids)
    assert hf.largest_difference(got, hf.torch_logits(model, ids)) < LOGITS


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_seeded_head_has_its_outcome(family: str, tmp_path: Path) -> None:
    tied, head = daily_random(family).choice([*LOADS, *REFUSED])
    check_cell(family, tmp_path, tied, head)


@pytest.mark.full
@pytest.mark.parametrize(("tied", "head"), [*LOADS, *REFUSED])
@pytest.mark.parametrize("family", sorted(TINY))
def test_every_head_has_its_outcome(
    family: str, tied: bool, head: str, tmp_path: Path
) -> None:
    check_cell(family, tmp_path, tied, head)
