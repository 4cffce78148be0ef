"""Beginning-of-text tokens in the rows of commands that read text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors

from dew.cli import main
from dew.data.teacher_cache import TeacherCache
from tests.support import hf_models as hf
from tests.support.tolerances import RTOL

BOS, WORDS = 1, "w5 w6 w7 w8 w9 w10 w11"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose tokenizer begins every text with a token, as Llama 2 and 3 have."""
    folder = hf.save(hf.llama(), tmp_path_factory.mktemp("bos"))
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    text = tokenizer.id_to_token(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{text} $A", special_tokens=[(text, BOS)]
    )
    tokenizer.save(file)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(WORDS)
    return file


def evaluated(model: Path, text: Path, capsys: Any, *more: str) -> Any:
    command = ["eval", "--model", str(model), "--data", str(text), "--json"]
    assert main([*command, "--seq-len", "16", *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("bos", ["auto", "always", "never"])
def test_perplexity_is_that_of_torch_with_the_token_or_without(
    bos: str, model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    got = evaluated(model, text, capsys, "--bos", bos)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(WORDS, add_special_tokens=bos != "never").ids
    assert (ids[0] == BOS) == (bos != "never")
    row = torch.tensor([[*ids, 2]])
    loss = hf.reloaded(model)(input_ids=row, labels=row).loss.item()
    assert got["tokens"] == row.shape[1] - 1
    np.testing.assert_allclose(got["perplexity"], np.exp(loss), rtol=RTOL["float32"])


def test_training_rows_carry_it_and_the_choice_is_printed_and_kept(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"""pretrain --model {model} --data {text} --steps 1 --batch-size 8
    --seq-len 9 --json --out {tmp_path / "run"}""".split()
    assert main(command) == 0
    assert "documents begin with" in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["bos"] == "auto"
    assert main([*command, "--resume", "--steps", "2", "--bos", "never"]) == 2
    assert "bos" in capsys.readouterr().err
    cache = f"""cache-teacher --teacher {model} --data {text} --out {tmp_path / "cache"}
    --top-k 4 --seq-len 9 --batch-size 1 --json""".split()
    assert main(cache) == 0
    assert TeacherCache(tmp_path / "cache")[0]["tokens"][0] == BOS


def test_always_needs_a_token(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hf.save(hf.llama(), tmp_path / "plain")
    hf.edit_config(folder, bos_token_id=None)
    command = ["eval", "--model", str(folder), "--data", str(text), "--bos", "always"]
    assert main(command) == 2
    assert "--bos always needs" in " ".join(capsys.readouterr().err.split())
