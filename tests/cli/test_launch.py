"""`dew launch` on the command line: real commands as two processes."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dew.cli import main
from dew.converters.load import load_native
from dew.converters.surgery import prune_layers
from dew.data.teacher_cache import TeacherCache
from tests.support import hf_models as hf
from tests.support.launched import Launched, all_gone, launched, on_hosts, trial
from tests.support.tolerances import RTOL


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
    ended = run.end()
    trial("kill -9 of the launcher", ended, all_gone(processes, within_s=15))
    assert ended.code == 137


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_signal_to_one_process_stops_all_at_one_checkpoint(
    model: Path, text: Path, tmp_path: Path
) -> None:
    _stopped(model, text, tmp_path, signal.SIGTERM, rank=1, code=143)


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "rank", "code"),
    [
        (signal.SIGTERM, None, 143),
        (signal.SIGINT, None, 130),
        (signal.SIGHUP, None, 143),
        (signal.SIGTERM, 0, 143),
        (signal.SIGINT, 0, 130),
        (signal.SIGINT, 1, 130),
    ],
)
def test_a_signal_stops_all_at_one_checkpoint(
    number: int, rank: int | None, code: int, model: Path, text: Path, tmp_path: Path
) -> None:
    _stopped(model, text, tmp_path, number, rank=rank, code=code)


def _stopped(
    model: Path, text: Path, folder: Path, number: int, *, rank: int | None, code: int
) -> None:
    out = folder / "run"
    options = ("--steps", "100000", "--keep-checkpoints", "1")
    run = Launched(folder, *pretrain(model, text, out, *options))
    run.until(lambda: run.shows("step 5/"))
    processes = run.ranks()
    run.send(number, rank=rank)
    ended = run.end()
    trial(f"signal {number} to {rank}", ended)
    assert (ended.code, len(checkpoints(out))) == (code, 1)
    assert ended.seconds < 60
    assert "error" not in ended.err
    assert int(checkpoints(out)[0]) >= 5
    all_gone(processes, within_s=5)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_all_and_is_named_last(
    rank: int, model: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = Launched(tmp_path, *pretrain(model, text, out, "--steps", "100000"))
    run.until(lambda: run.shows("step 5/"))
    processes = run.ranks()
    run.send(signal.SIGKILL, rank=rank)
    ended = run.end()
    trial(f"kill -9 of process {rank}", ended)
    assert (ended.code, ended.last) == (
        137,
        f"dew: error: process {rank} was ended by SIGKILL",
    )
    assert ended.seconds < 15
    assert ".cc:" not in ended.err
    assert "Traceback" not in ended.err
    all_gone(processes, within_s=5)


@pytest.mark.full
def test_a_second_ctrl_c_ends_all_at_once(
    model: Path, text: Path, tmp_path: Path
) -> None:
    run = Launched(
        tmp_path, *pretrain(model, text, tmp_path / "run", "--steps", "100000")
    )
    run.until(lambda: len(run.ranks()) == 2)
    processes = run.ranks()
    run.send(signal.SIGINT)
    run.send(signal.SIGINT)
    ended = run.end()
    trial("two Ctrl-C at the start", ended)
    assert (ended.code, "error" in ended.err) == (130, False)
    assert ended.seconds < 5
    all_gone(processes, within_s=5)


@pytest.mark.full
def test_a_run_folder_in_use_is_one_error_of_all(
    model: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "other").write_text("")
    ended = launched(tmp_path / "log", *pretrain(model, text, tmp_path / "run"))
    trial("run folder in use", ended)
    assert ended.code == 2
    assert "is in use and holds no run of ours" in ended.last
    assert ended.err.count("dew: error:") == 1


@pytest.mark.full
def test_an_export_that_cannot_be_written_is_one_error_of_all(
    model: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = Launched(tmp_path, *pretrain(model, text, out, "--steps", "6"))
    run.until((out / "run.json").exists)
    (out / "export").write_text("not a folder")
    ended = run.end()
    trial("export cannot be written", ended)
    assert ended.code == 2
    assert "export is not a folder" in ended.last


@pytest.mark.full
def test_data_that_one_host_lacks_ends_all_and_is_named(
    model: Path, text: Path, tmp_path: Path
) -> None:
    folders = text, tmp_path / "nowhere"
    commands = [pretrain(model, data, tmp_path / "run") for data in folders]
    first, second = on_hosts(tmp_path, *commands)
    trial("data missing on one host, process 0", first)
    trial("data missing on one host, process 1", second)
    fault = f"--data: {folders[1]} does not exist"
    assert (first.code, second.code) == (2, 2)
    assert second.last == f"dew: error: {fault}"
    assert first.last.startswith("dew: error: process 1 failed")
    assert first.last.endswith(fault)
    assert max(first.seconds, second.seconds) < 60


@pytest.fixture(scope="module")
def student(model: Path) -> Path:
    return prune_layers(load_native(model), (1,), model.parent / "student")


def training(kind: str, model: Path, student: Path, text: Path, out: Path) -> list[str]:
    """The command of one kind of training; a cache stands beside its run."""
    pretraining = ["pretrain", "--model", str(model)]
    taught = ["distill", "--student", str(student)]
    command, data = {
        "pretrain": (pretraining, True),
        "lora": ([*pretraining, "--lora-rank", "4"], True),
        "fsdp": ([*pretraining, "--fsdp", "2"], True),
        "cache": (
            f"--teacher-road cache --cache {out.parent / 'cache'} --terms kl".split(),
            False,
        ),
    }.get(kind, (["--teacher", str(model), "--teacher-road", kind], True))
    if "pretrain" not in command:
        command = [*taught, *command]
    if data:
        command = [*command, "--data", str(text)]
    # The text's last batch is not full, so that the parts of processes are unequal.
    command = [*command, "--eval-data", str(text)]
    settings = """--steps 4 --batch-size 8 --seq-len 32 --learning-rate 1e-2
        --schedule constant --json --log-every 1 --out"""
    return [*command, *settings.split(), str(out)]


def alone(command: Sequence[str]) -> list[str]:
    """The same command for one process, whose weights nothing splits."""
    if "--fsdp" not in command:
        return list(command)
    at = command.index("--fsdp")
    return [*command[:at], *command[at + 2 :]]


def test_processes_distill_the_student_that_one_does(
    model: Path, student: Path, text: Path, tmp_path: Path, capfd: Any
) -> None:
    _trains_alike("native", model, student, text, tmp_path, capfd)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["pretrain", "lora", "fsdp", "lowered", "live"])
def test_processes_train_the_model_that_one_does(
    kind: str, model: Path, student: Path, text: Path, tmp_path: Path, capfd: Any
) -> None:
    _trains_alike(kind, model, student, text, tmp_path, capfd)


@pytest.mark.full
def test_processes_train_from_a_cache_as_one_does(
    model: Path, student: Path, text: Path, tmp_path: Path, capfd: Any
) -> None:
    command = f"cache-teacher --teacher {model} --data {text} --seq-len 32 --top-k 8"
    assert main([*command.split(), "--out", str(tmp_path / "cache"), "--json"]) == 0
    capfd.readouterr()
    _trains_alike("cache", model, student, text, tmp_path, capfd)


def _trains_alike(
    kind: str, model: Path, student: Path, text: Path, folder: Path, capfd: Any
) -> None:
    runs = folder / "together", folder / "alone"
    command, other = (training(kind, model, student, text, run) for run in runs)
    ended = launched(folder / "log", *command)
    trial(kind, ended)
    assert ended.code == 0, ended.err
    assert main(alone(other)) == 0
    together, by_one = json.loads(ended.out), json.loads(capfd.readouterr().out)
    # The largest difference seen is 1.2e-7.
    np.testing.assert_allclose(
        together["losses"], by_one["losses"], rtol=RTOL["float32"]
    )
    scored, expected = (result["eval"]["after"] for result in (together, by_one))
    assert scored["tokens"] == expected["tokens"]
    assert scored["perplexity"] == pytest.approx(
        expected["perplexity"], rel=RTOL["float32"]
    )
    assert together["certificate"]["passed"]
    assert ended.err.count("step 4/4") == 1


@pytest.mark.full
@pytest.mark.parametrize("counts", [(2, 2), (1, 2), (2, 1)])
def test_a_launched_run_resumes_and_exports_as_one_of_one_process(
    counts: tuple[int, int],
    model: Path,
    student: Path,
    text: Path,
    tmp_path: Path,
    capfd: Any,
) -> None:
    out = tmp_path / "run"
    command = training("pretrain", model, student, text, out)
    losses: list[float] = []
    for count, more in zip(counts, (["--steps", "2"], ["--resume"]), strict=True):
        if count == 1:
            assert main([*command, *more]) == 0
            losses += json.loads(capfd.readouterr().out)["losses"]
        else:
            ended = launched(tmp_path / more[0], *command, *more)
            trial(f"{counts} {more}", ended)
            assert ended.code == 0, ended.err
            losses += json.loads(ended.out)["losses"]
    assert main(training("pretrain", model, student, text, tmp_path / "alone")) == 0
    by_one = json.loads(capfd.readouterr().out)
    np.testing.assert_allclose(losses, by_one["losses"], rtol=RTOL["float32"])
    assert main(["export", str(out), str(tmp_path / "again"), "--json"]) == 0
    exported, again = (
        (folder / "model.safetensors").read_bytes()
        for folder in (out / "export", tmp_path / "again")
    )
    assert exported == again
    certificate = json.loads((tmp_path / "again" / "certificate.json").read_text())
    assert certificate["passed"]


@pytest.mark.full
def test_processes_score_a_text_as_one_does(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"eval --model {model} --data {text} --seq-len 32 --batch-size 8 --json"
    alone = printed(capsys, *command.split())
    ended = launched(tmp_path, *command.split())
    trial("eval", ended)
    together = json.loads(ended.out)
    assert together["tokens"] == alone["tokens"]
    # The largest difference seen is 0.
    assert together["perplexity"] == pytest.approx(
        alone["perplexity"], rel=RTOL["float32"]
    )


def test_processes_write_the_cache_that_one_does(
    model: Path, text: Path, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "together", tmp_path / "alone"
    # Nine batches and files of three, so that the last turn is not full.
    command = f"""cache-teacher --teacher {model} --data {text} --json
        --seq-len 32 --batch-size 5 --shard-rows 15 --top-k 4""".split()
    assert main([*command, "--out", str(theirs)]) == 0
    ended = launched(tmp_path, *command, "--out", ours)
    trial("cache-teacher", ended)
    assert ended.code == 0, ended.err
    written = {path.name: path.read_bytes() for path in ours.iterdir()}
    assert written == {path.name: path.read_bytes() for path in theirs.iterdir()}
    assert json.loads(ended.out)["tokens"] == TeacherCache(ours).manifest.tokens


@pytest.mark.full
def test_bad_input_of_all_processes_is_one_line(model: Path, tmp_path: Path) -> None:
    # Files beside the user are no modules, for processes as for the command alone.
    (tmp_path / "json.py").write_text("raise ImportError('a file of the user')")
    command = pretrain(model, tmp_path / "nowhere", tmp_path / "run")
    ended = launched(tmp_path, *command, cwd=tmp_path)
    trial("bad input of all", ended)
    assert ended.code == 2
    fault = f"--data: {tmp_path / 'nowhere'} does not exist"
    assert ended.err == f"dew: error: {fault}\n"
