"""Real processes: killed, asked to stop, and several at once."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 12


def start(folder: Path, losses: Path) -> "subprocess.Popen[bytes]":
    with losses.with_name("errors").open("ab") as errors:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.runs",
                *map(str, (folder, STEPS, losses)),
            ],
            cwd=ROOT,
            stderr=errors,
            env={**os.environ, "XLA_FLAGS": ""},
        )


def finish(folder: Path, losses: Path) -> None:
    """Lets a run go on to its end."""
    code = start(folder, losses).wait(timeout=300)
    assert code == 0, losses.with_name("errors").read_text()


def trace(losses: Path) -> dict[int, set[str]]:
    """Every value written for each commit; a resumed run writes some of them twice."""
    seen: dict[int, set[str]] = {}
    for line in losses.read_text().splitlines():
        step, value = line.split()
        seen.setdefault(int(step), set()).add(value)
    return seen


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    folder = tmp_path_factory.mktemp("whole")
    finish(folder / "run", folder / "losses")
    return trace(folder / "losses")


def wait_for_commits(
    losses: Path, count: int, process: "subprocess.Popen[bytes]"
) -> None:
    while not losses.exists() or len(losses.read_text().splitlines()) < count:
        assert process.poll() is None, "the run ended before its time"
        time.sleep(0.005)


def test_killed_twice_and_resumed_the_trace_is_bit_equal(
    tmp_path: Path, uninterrupted: dict[int, set[str]]
) -> None:
    losses = tmp_path / "losses"
    rng = random.Random(0)
    for count in (3, 9):
        process = start(tmp_path / "run", losses)
        wait_for_commits(losses, count, process)
        # Every other commit saves, so some kill falls into a save.
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
    finish(tmp_path / "run", losses)
    assert trace(losses) == uninterrupted


def test_killed_while_a_save_is_under_way_the_trace_is_bit_equal(
    tmp_path: Path, uninterrupted: dict[int, set[str]]
) -> None:
    losses, run = tmp_path / "losses", tmp_path / "run"
    process = start(run, losses)
    while not list(run.glob("*orbax-checkpoint-tmp*")):
        assert process.poll() is None, "the run ended before a save was seen"
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finish(run, losses)
    assert trace(losses) == uninterrupted


def test_sigterm_saves_and_exits_143(
    tmp_path: Path, uninterrupted: dict[int, set[str]]
) -> None:
    losses, run = tmp_path / "losses", tmp_path / "run"
    process = start(run, losses)
    wait_for_commits(losses, 3, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    done = max(trace(losses))
    assert (run / str(done)).is_dir()
    finish(run, losses)
    assert trace(losses) == uninterrupted
