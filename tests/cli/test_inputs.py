"""Faults of flags and files: all in one line, and before any model is loaded.

Models here have weights that no reader accepts, so that an error other than theirs
shows that they were not read.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dew.cli import main
from dew.cli.pretrain import Pretrain
from dew.cli.terms import parse_terms, term_faults
from dew.data.teacher_cache import Binding, CacheWriter
from dew.losses.student_loss import StudentLoss
from dew.losses.term import at
from dew.runs import RunFolder, TrainedModel
from tests.support import hf_models as hf
from tests.support.tolerances import ATOL, RTOL

DAMAGED = b"no safetensors file starts like this"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything in order but its weights, which nothing can read."""
    folder = hf.save(hf.llama(), tmp_path_factory.mktemp("damaged") / "model")
    (folder / "model.safetensors").write_bytes(DAMAGED)
    return folder


@pytest.fixture(scope="module")
def small(damaged: Path) -> Path:
    """The same with one block, by its config."""
    folder = shutil.copytree(damaged, damaged.parent / "small")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def text(damaged: Path) -> Path:
    file = damaged.parent / "text.txt"
    file.write_text("w1 w2 w3")
    return file


@pytest.fixture
def places(
    damaged: Path,
    small: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    (tmp_path / "blank.txt").write_text("\n\n")
    bare = shutil.copytree(damaged, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    (bare / "model.safetensors").unlink()
    return {
        "model": damaged,
        "small": small,
        "text": text,
        "taken": tmp_path / "taken",
        "blank": tmp_path / "blank.txt",
        "bare": bare,
    }


def refused(command: str, places: dict[str, Path], capsys: Any) -> str:
    """The one line with which a command is refused."""
    try:
        code = main(command.format(**places).split())
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr()
    assert code == 2
    assert not said.out
    lines = said.err.strip().splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("dew: error: ")
    return lines[0]


BROKEN = {
    "pretrain": (
        "pretrain --model {bare} --data none.txt --eval-data none.jsonl --out {taken} "
        "--steps 0 --batch-size -1 --seq-len 1 --learning-rate nan --track board "
        "--eval-every 0 --lora-alpha 4 --warmup -1",
        (
            "bare has no weights",
            "bare has no tokenizer.json",
            "--data: none.txt does not exist",
            "--eval-data: none.jsonl does not exist",
            "taken is in use",
            "--steps must be at least 1, got 0",
            "--batch-size must be at least 1, got -1",
            "--seq-len must be at least 2, got 1",
            "--learning-rate must be a number",
            "no tracker is called 'board'",
            "--eval-every must be at least 1",
            "--lora-alpha need --lora-rank",
            "--warmup must be at least 0",
        ),
    ),
    "distill": (
        "distill --teacher models/none --student {bare} --data none.txt --out {taken} "
        "--terms k kl=high ce=linear:1->0 hiden jsd=sine:1->0@5 --temperature 0 "
        "--on-policy 2 --chunk 0 --top-k 0 --steps 0",
        (
            "--teacher: models/none is neither here nor to be had",
            "--student: {bare} has no weights",
            "--data: none.txt does not exist",
            "'k' is none of kl",
            "the weight in 'kl=high' must be a number",
            "the weight in 'ce=linear:1->0' must be a number, as in kl=0.5, or a "
            "schedule, as in kl=linear:1.0->0.1@1000",
            "'hiden' is none of .*; did you mean hidden",
            "the weight in 'jsd=sine:1->0@5'",
            "--temperature must be a number above 0, got 0",
            "--on-policy must be from 0 to 1, got 2",
            "--chunk must be at least 1",
            "--top-k must be at least 1",
            "taken is in use",
            "--steps must be at least 1",
        ),
    ),
    "check": (
        "check --teacher nowhere/at/all --student {bare} --data none.txt --terms "
        "forward_kl --temperature inf --rows 0",
        (
            "--teacher: there is no folder nowhere/at/all",
            "--student: {bare} has no weights",
            "--data: none.txt does not exist",
            "'forward_kl' is none of",
            "--temperature must be a number above 0, got inf",
            "--rows must be at least 1",
        ),
    ),
    "cache-teacher": (
        "cache-teacher --teacher {bare} --data none.txt --captured none.parquet "
        "--compression none.yaml --out {taken} --top-k 0 --temperature -1",
        (
            "--captured: none.parquet does not exist",
            "none.yaml",
            "--data: none.txt does not exist",
            "give --data or --captured",
            "--out: .*taken is not a teacher cache",
            "--top-k must be at least 1",
            "--temperature must be",
            "bare has no tokenizer.json",
        ),
    ),
    "eval": (
        "eval --model nowhere/at/all --data {text} none.txt --seq-len 0",
        (
            "--model: there is no folder nowhere/at/all",
            "--data: none.txt does not exist",
            "--seq-len must be at least 2",
        ),
    ),
    "generate": (
        "generate --model {bare} --prompt w1 --max-new-tokens 0 --temperature -1",
        (
            "--model: {bare} has no weights",
            "has no tokenizer.json",
            "--max-new-tokens must be at least 1",
            "--temperature must be at least 0",
        ),
    ),
    "prune": (
        "prune --model {small} --out {taken} --layers 0 0 7 --num-layers 9 --mlp 0",
        (
            "taken exists and is not an earlier certified export",
            "a block is named twice",
            r"\[7\] are no blocks of 0 to 0",
            "--num-layers must be at most the 1 blocks, got 9",
            "give --layers or --num-layers, not both",
            "--mlp must be at least 1",
        ),
    ),
    "extend": (
        "extend --model {small} --out {taken} --add-tokens w1 <a> <a>",
        (
            "taken exists",
            "'w1' is in the vocabulary already",
            "'<a>' is given twice",
        ),
    ),
    "export": (
        "export {bare} {taken} --max-shard-size huge --adapter-only --merge",
        (
            "MODEL: {bare} has no weights",
            "taken exists",
            "--max-shard-size",
            "--adapter-only needs a model with an adapter",
            "--merge: .*bare has no adapter to merge",
            "--adapter-only writes the adapter alone",
        ),
    ),
    "verify": (
        "verify nowhere/at/all --prompt-file none.txt",
        (
            "FOLDER: there is no folder nowhere/at/all",
            "--prompt-file: there is no prompt file none.txt",
        ),
    ),
}


@pytest.mark.parametrize("command", BROKEN)
def test_all_faults_of_a_command_are_one_line(
    command: str, places: dict[str, Path], capsys: Any
) -> None:
    words, faults = BROKEN[command]
    line = refused(words, places, capsys)
    missing = [f for f in faults if not re.search(f.format(**places), line)]
    assert not missing, f"{missing} in {line}"


DISTILL = "distill --teacher {model} --student {small} --out o --data {text} "
ONE_SLIP = {
    "pretrain --model {model} --data {text} --out o --steps 0": "--steps",
    "pretrain --model {model} --data {blank} --out o": "blank.txt is empty",
    DISTILL + "--terms kl=": "the weight in 'kl=' must be a number",
    DISTILL + "--terms kl=nan": "the weight in 'kl=nan' must be a number",
    DISTILL + "--terms kl=linear:1->0@0": "the weight in 'kl=linear:1->0@0'",
    DISTILL + "--terms kl=0.5@10": "the weight in 'kl=0.5@10'",
    DISTILL + "--temperature linear:2->1@9": "--temperature",
    DISTILL + "--terms uld --teacher-road live": "ULD reads full probabilities",
    DISTILL + "--terms attention": "attention needs both models on the native road",
    DISTILL + "--terms student_loss --chunk 4": "student_loss cannot be chunked",
    DISTILL + "--on-policy 1 --teacher-road live": "needs a teacher in the step",
    DISTILL + "--on-policy 1 --seq-len 8 --on-policy-tokens 8": "room for a prompt",
    DISTILL + "--cache nowhere": "--cache goes with --teacher-road cache",
    DISTILL.replace("{model} --student {small}", "{small} --student {model}")
    + "--terms hidden": "even layers need 1 <= student <= teacher blocks, got 2, 1",
    "check --teacher {model} --student {model} --data {text} --terms k": "'k' is none",
    "cache-teacher --teacher {model} --data {text} --out o --top-k 0": "--top-k",
    "eval --model {model} --data none.txt": "none.txt does not exist",
    "generate --model {model} --prompt w1 --max-new-tokens 0": "--max-new-tokens",
    "prune --model {model} --out o --layers 0 5": "[5] are no blocks of 0 to 1",
    "extend --model {model} --out o --add-tokens w1": "in the vocabulary already",
    "export {model} o --max-shard-size huge": "--max-shard-size",
    "export {model} {taken}": "taken exists and is not",
    "verify {model} --prompt-file none.txt": "--prompt-file",
    "launch --processes 2 -- " + DISTILL + "--terms k": "'k' is none of kl",
    "pretrain --model {model} --data {text} --out o --steps many": "--steps",
    "eval --modle x": "--modle",
    "evaluate": "evaluate",
}


@pytest.mark.parametrize("command", ONE_SLIP)
def test_a_slip_is_found_before_the_weights_are_read(
    command: str, places: dict[str, Path], capsys: Any
) -> None:
    line = refused(command, places, capsys)
    assert ONE_SLIP[command] in line
    assert "safetensors" not in line
    assert not Path("o").exists()


def test_tokenizers_that_differ_are_found_in_their_files(
    places: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    other = shutil.copytree(places["model"], tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["z5"] = words.pop("w5")
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    places = {**places, "other": other}
    command = DISTILL.replace("{model}", "{other}")
    line = refused(command, places, capsys)
    assert "--teacher and --student: the vocabularies could not be proved" in line
    # Terms that compare ranks alone need no common vocabulary.
    line = refused(command + "--terms uld student_loss", places, capsys)
    assert "model.safetensors" in line
    (other / "tokenizer.json").write_text('{"model": 5}')
    line = refused("extend --model {other} --out o --add-tokens <a>", places, capsys)
    assert "tokenizer.json cannot be read" in line


def test_settings_of_a_resumed_run_are_compared_before_its_weights_are_read(
    places: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    words = "pretrain --model {model} --data {text} --out run --seq-len 8 "
    refused(words, places, capsys)
    model = TrainedModel(address=str(places["model"]))
    settings = Pretrain(
        model=str(places["model"]),
        data=(str(places["text"]),),
        out=Path("run"),
        seq_len=8,
    ).config()
    RunFolder(Path("run")).begin(settings, {}, model=model, resume=False)
    assert "pass --resume" in refused(words, places, capsys)
    line = refused(words + "--resume --seed 3 --steps 0", places, capsys)
    assert "--seed was 0, is 3" in line
    assert "--steps must be at least 1" in line
    assert "model.safetensors" in refused(words + "--resume", places, capsys)


@pytest.mark.parametrize("written", ["[]", "{{", '{"version": 1, "shards": []}'])
def test_a_damaged_manifest_is_one_fault_among_others(
    written: str, places: dict[str, Path], capsys: Any
) -> None:
    Path("cache").mkdir()
    Path("cache/manifest.json").write_text(written)
    words = "distill --student {model} --teacher-road cache --cache cache --out o "
    line = refused(words + "--terms k", places, capsys)
    assert "--cache cache: " in line
    assert "'k' is none of kl" in line


def test_without_a_slip_the_weights_are_what_is_wrong(
    places: dict[str, Path], capsys: Any
) -> None:
    command = DISTILL + "--teacher-road native --terms kl=cosine:1->0.5@3 student_loss"
    assert "model.safetensors" in refused(command, places, capsys)


def test_a_cache_that_is_not_of_the_run_is_refused_by_its_manifest(
    places: dict[str, Path], capsys: Any
) -> None:
    binding = Binding(
        teacher="x", tokenizer="x", order={}, seq_len=8, vocab=hf.VOCAB, k=3
    )
    CacheWriter(folder=Path("cache"), binding=binding)
    words = "distill --student {model} --teacher-road cache --cache cache --out o "
    line = refused(words + "--terms uld hidden --temperature 2", places, capsys)
    for fault in (
        "seq_len must be 1024, it has 8",
        "temperature must be 2.0, it has 1.0",
        "tokenizer must be",
        "is not complete",
        "ULD reads full probabilities",
        "a cache keeps neither hidden states nor attention",
    ):
        assert fault in line
    again = "cache-teacher --teacher {model} --data {text} --out cache --seq-len 9"
    line = refused(again, places, capsys)
    assert "seq_len was 8 and is 9; " in line
    assert "k was 3 and is 16" in line


def test_words_of_terms_become_weights_and_schedules() -> None:
    words = ("kl", "ce=0.5", "jsd=linear:1->0@10", "student_loss=cosine:2->1e-1@10")
    assert not term_faults(words)
    terms = parse_terms(words, temperature=2.0, pairs=lambda: (), accumulation=3)
    assert isinstance(terms[3], StudentLoss)
    at_15, at_30 = ([float(at(t.weight, step)) for t in terms] for step in (15, 30))
    np.testing.assert_allclose(at_15[:3], [1, 0.5, 0.5], rtol=RTOL["float32"])
    np.testing.assert_allclose(
        at_30, [1, 0.5, 0, 0.1], rtol=RTOL["float32"], atol=ATOL["small float32"]
    )
