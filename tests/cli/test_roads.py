"""Which road a model takes, and the command line on the lowered one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import Lfm2Config

import dew
from dew.cli import main
from dew.converters.load import UnknownFamilyError
from dew.data import evaluation_batches
from tests.support import hf_models as hf
from tests.support.tolerances import ROADS, RTOL


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Lfm2Config(**{**hf.LLAMA, "layer_types": ["conv", "full_attention"]})
    return hf.save(hf.build(config), tmp_path_factory.mktemp("lfm2"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that count upwards, of one word to thirty."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(30):
        words = " ".join(f"w{(3 * i + j) % 90}" for j in range(i + 1))
        (folder / f"{i}.txt").write_text(words)
    return folder


def pretrain(model: Path, text: Path, out: Path, *more: str) -> list[str]:
    return (
        f"""pretrain --model {model} --data {text} --out {out} --steps 4
        --batch-size 8 --seq-len 16 --learning-rate 1e-2 --json
        """.split()
        + list(more)
    )


def test_a_family_without_native_support_takes_the_lowered_road_and_says_so(
    lfm2: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(pretrain(lfm2, text, tmp_path / "run", "--packing", "apart")) == 0
    said = capsys.readouterr()
    printed = " ".join(said.err.split())
    assert "no family for model_type 'lfm2'" in printed
    assert "it takes the lowered one" in printed
    result = json.loads(said.out)
    assert result["losses"][-1] < result["losses"][0]
    assert result["certificate"]["passed"]
    assert result["certificate"]["road"] == "lowered"
    hf.reloaded(tmp_path / "run" / "export")


@pytest.mark.full
def test_a_model_that_would_mix_packed_documents_says_which_packing_to_use(
    lfm2: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(pretrain(lfm2, text, tmp_path / "run")) == 2
    assert "packing='apart'" in " ".join(capsys.readouterr().err.split())


def test_the_native_road_alone_refuses_what_it_does_not_have(lfm2: Path) -> None:
    with pytest.raises(UnknownFamilyError, match="no family for model_type 'lfm2'"):
        dew.load(lfm2, road="native")


@pytest.mark.full
def test_the_lowered_road_trains_what_the_native_one_does(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, losses = hf.save(hf.llama(num_hidden_layers=1), tmp_path / "llama"), {}
    for road in ("native", "lowered"):
        assert main(pretrain(model, text, tmp_path / road, "--road", road)) == 0
        losses[road] = json.loads(capsys.readouterr().out)["losses"]
    # Four steps of AdamW apart; the largest difference seen is 2e-6.
    np.testing.assert_allclose(
        losses["lowered"], losses["native"], rtol=RTOL["reordered"]
    )
    ids = hf.tokens(2, 16)
    found: list[Any] = [
        hf.torch_logits(hf.reloaded(tmp_path / road / "export"), ids) for road in losses
    ]
    assert hf.largest_difference(*found) < ROADS


def test_rows_apart_hold_one_document_each(lfm2: Path, text: Path) -> None:
    tokenizer = Tokenizer.from_file(str(lfm2 / "tokenizer.json"))
    texts = [(text / f"{i}.txt").read_text() for i in (3, 29, 5)]
    (batch,) = evaluation_batches(
        texts, tokenizer=tokenizer, seq_len=16, batch_size=6, packing="apart"
    )
    assert set(batch) == {"tokens", "mask"}
    assert batch["mask"].sum(1).tolist() == [4, 16, 14, 6, 0, 0]
    want = tokenizer.encode(texts[1]).ids
    rows = batch["tokens"][1:3][batch["mask"][1:3] > 0]
    assert rows.tolist() == want
