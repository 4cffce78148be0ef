"""What becomes of a tied head, in every case of config against file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dew
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS

HEAD = "lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf.save(hf.llama(num_hidden_layers=1), tmp_path / "m")


def head_of(folder: Path, head: str) -> Path:
    """Stores no head, one equal to the embedding, or another."""
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    kinds = {"absent": None, "equal": embed.clone(), "different": embed + 1}
    return hf.edit_tensors(folder, {HEAD: kinds[head]})


@pytest.mark.parametrize(
    ("tied", "head", "in_model"),
    [
        (True, "absent", False),
        (True, "equal", False),
        (False, "equal", True),
        (False, "different", True),
    ],
)
def test_a_head_that_agrees_loads_and_leaves_as_it_was(
    folder: Path, tmp_path: Path, tied: bool, head: str, in_model: bool
) -> None:
    head_of(hf.edit_config(folder, tie_word_embeddings=tied), head)
    source = dew.load(folder)
    assert ("head" in source.variables["params"]) == in_model
    model = hf.reloaded(folder)
    ids = hf.tokens()
    assert (
        hf.largest_difference(source.logits(ids), hf.torch_logits(model, ids)) < LOGITS
    )
    out = dew.save(source, tmp_path / "out", hf.shaken(source.variables))
    assert (HEAD in load_file(out / "model.safetensors")) == (head != "absent")


def test_a_tied_copy_is_trained_with_its_embedding(
    folder: Path, tmp_path: Path
) -> None:
    head_of(hf.edit_config(folder, tie_word_embeddings=True), "equal")
    source = dew.load(folder)
    out = dew.save(source, tmp_path / "out", hf.shaken(source.variables))
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors[HEAD], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(("tied", "head"), [(True, "different"), (False, "absent")])
def test_a_head_that_disagrees_is_refused_with_the_flag_that_settles_it(
    folder: Path, tied: bool, head: str
) -> None:
    head_of(hf.edit_config(folder, tie_word_embeddings=tied), head)
    with pytest.raises(ValueError, match=r'lm_head.weight.*tied="stored".*tied="conf'):
        dew.load(folder)


@pytest.mark.parametrize(
    ("tied", "head", "side", "becomes", "stored"),
    [
        (True, "different", "stored", False, True),
        (True, "different", "config", True, False),
        (False, "absent", "stored", True, False),
        (False, "absent", "config", False, True),
    ],
)
def test_a_settled_head_is_written_as_it_was_settled(
    folder: Path,
    tmp_path: Path,
    tied: bool,
    head: str,
    side: Any,
    becomes: bool,
    stored: bool,
) -> None:
    head_of(hf.edit_config(folder, tie_word_embeddings=tied), head)
    source = dew.load(folder, tied=side)
    out = dew.save(source, tmp_path / "out")
    assert (HEAD in load_file(out / "model.safetensors")) == stored
    model = hf.reloaded(out)
    assert model.config.tie_word_embeddings == becomes
    ids = hf.tokens()
    assert (
        hf.largest_difference(source.logits(ids), hf.torch_logits(model, ids)) < LOGITS
    )
    np.testing.assert_array_equal(dew.load(out).logits(ids), source.logits(ids))
