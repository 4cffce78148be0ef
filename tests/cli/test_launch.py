"""`dew launch` on the command line: real commands as two processes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from dew.cli import main
from tests.support import hf_models as hf
from tests.support.launched import Launched, all_gone, launched


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(hf.llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of growing length, so that the last batch is not full."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(20):
        words = " ".join(f"w{(i + j) % 90}" for j in range(50 + i))
        (folder / f"{i}.txt").write_text(words)
    return folder


def pretrain(model: Path, text: Path, out: Path, *more: str) -> list[str]:
    return [
        *f"pretrain --model {model} --data {text} --out {out} --batch-size 8".split(),
        *"--seq-len 32 --learning-rate 1e-2 --json --log-every 1".split(),
        *"--checkpoint-every 2 --schedule constant".split(),
        *more,
    ]


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    """What a command prints as one process."""
    assert main(list(map(str, arguments))) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("generate --model x --prompt w1", "dew generate is the work of one process"),
        ("export x y", "dew export is the work of one process"),
        ("launch --processes 2 -- eval", "dew launch is the work of one process"),
        ("pretrain --modle x", "--modle"),
        ("", "dew launch needs --processes >= 1 and a command after --"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_a_process_starts(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(f"launch --processes 2 -- {command}".split())
    except SystemExit as refused:
        code = refused.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_a_process_that_others_do_not_know_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEW_COORDINATOR", "here:1234")
    monkeypatch.setenv("DEW_PROCESSES", "2")
    monkeypatch.setenv("DEW_PROCESS", "2")
    assert main("eval --model x --data y".split()) == 2
    said = "DEW_PROCESS counts from 0 to DEW_PROCESSES - 1, got 2 of 2"
    assert said in capsys.readouterr().err
    monkeypatch.delenv("DEW_PROCESS")
    assert main("eval --model x --data y".split()) == 2
    assert "DEW_PROCESS must be a number, got nothing" in capsys.readouterr().err


def test_killing_the_launcher_leaves_no_process(
    model: Path, text: Path, tmp_path: Path
) -> None:
    run = Launched(tmp_path, *pretrain(model, text, tmp_path / "run"))
    run.until(lambda: run.shows("step 3/"))
    processes = run.ranks()
    run.send(signal.SIGKILL)
    assert len(processes) == 2
    assert run.end().code == 137
    all_gone(processes, within_s=15)


@pytest.mark.full
def test_bad_input_of_all_processes_is_one_line(model: Path, tmp_path: Path) -> None:
    command = pretrain(model, tmp_path / "nowhere", tmp_path / "run")
    ended = launched(tmp_path, *command)
    assert ended.code == 2
    fault = f"the data cannot be read: {tmp_path / 'nowhere'} does not exist"
    assert ended.err == f"dew: error: {fault}\n"
