"""Ids and positions without a row, found before training and named with bounds."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import GPT2Config

import dew
from dew.cli import main
from dew.objectives import CausalLM, Perplexity
from dew.training import Trainer, adamw
from tests.support import hf_models as hf


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("w1 w2 w3 w4 " * 50)
    return file


@pytest.fixture
def larger(tmp_path: Path) -> Path:
    """A model whose tokenizer has two tokens more than its tables have rows."""
    folder = hf.save(hf.llama(), tmp_path / "larger")
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens(["<image>", "<pad>"])
    tokenizer.save(file)
    return folder


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_tokenizer_larger_than_the_table_is_refused_by_every_command(
    larger: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, data = str(larger), ["--data", str(text)]
    plain = str(hf.save(hf.llama(), tmp_path / "plain"))
    out = ["--out", str(tmp_path / "out")]
    for command in (
        ["pretrain", "--model", name, *data, *out],
        ["eval", "--model", name, *data],
        ["generate", "--model", name, "--prompt", "w1"],
        ["distill", "--student", name, "--teacher", plain, *data, *out],
        ["cache-teacher", "--teacher", name, *data, *out],
        ["check", "--student", name, "--teacher", plain, *data],
    ):
        said = refused(command, capsys)
        assert "has ids up to 98" in said
        assert "have 97 rows" in said
        assert "dew extend" in said


def test_extend_gives_rows_to_the_tokens_that_lack_one(
    larger: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "grown"
    assert main(["extend", "--model", str(larger), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 99
    assert dew.load(out).config["vocab_size"] == 99
    assert hf.reloaded(out).config.vocab_size == 99
    assert main(["eval", "--model", str(out), "--data", str(text), "--json"]) == 0


def test_rows_longer_than_learned_positions_are_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPT2Config(
        vocab_size=97, eos_token_id=2, n_layer=1, n_head=2, n_embd=16, n_positions=32
    )
    folder = str(hf.save(hf.build(config), tmp_path / "gpt2"))
    for command in ("pretrain", "eval"):
        more = ["--out", str(tmp_path / "run")] if command == "pretrain" else []
        arguments = ["--model", folder, "--data", str(text), "--seq-len", "64", *more]
        said = refused([command, *arguments], capsys)
        assert "at most the 32 learned positions" in said
        assert "got 64" in said


@pytest.mark.parametrize("wrong", [-1, 97])
def test_ids_out_of_range_in_a_batch_are_refused_at_the_first(
    wrong: int, tmp_path: Path
) -> None:
    source = dew.load(hf.save(hf.llama(), tmp_path / "model"))
    tokens = hf.tokens(8, 12).astype(np.int32)
    tokens[3, 5] = wrong
    objective = CausalLM(source=source, seq_len=12)
    trainer = Trainer(objective, adamw(1e-3), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"ids in \[0, 96\].* got ids in \["):
        trainer.fit(iter([{"tokens": tokens}]), steps=1)
    mask = tokens != wrong
    trainer.fit(iter([{"tokens": tokens, "mask": mask}]), steps=1)


def test_weights_that_are_not_finite_are_not_called_a_matter_of_the_learning_rate(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hf.save(hf.llama(), tmp_path / "model")
    hf.edit_tensors(folder, {"model.norm.weight": torch.full((32,), torch.nan)})
    data = ["--model", str(folder), "--data", str(text), "--seq-len", "8"]
    said = refused(["eval", *data, "--json"], capsys)
    assert "is not a number" in said
    run = ["--batch-size", "8", "--out", str(tmp_path / "run"), "--json"]
    assert main(["pretrain", *data, *run]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "learning rate" not in said.split("not finite")[-1]


def test_a_perplexity_beyond_floats_is_infinite() -> None:
    assert Perplexity().finalize((7100.0, 10.0)) == np.inf
    assert np.isfinite(Perplexity().finalize((7090.0, 10.0)))
