"""SIGTERM and Ctrl-C at every place of a run in one process."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dew.state import TrainState
from dew.training.checkpoint import Checkpoints, Keep
from dew.training.trainer import Trainer
from tests.support.parallel_runs import Happens
from tests.support.runs import Losses, Rows, held_out, trainer

ROOT = Path(__file__).parents[2]
STEPS = 4


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class InterruptedRows(Rows):
    """Rows before one of which Ctrl-C is pressed, in the middle of a window."""

    def __init__(self, at: int | None, **settings: Any) -> None:
        self.at = at
        super().__init__(**settings)

    def __next__(self) -> dict[str, Any]:
        if self.position == self.at:
            self.at = None
            interrupt()
        return super().__next__()


@pytest.fixture(scope="module")
def shared() -> Trainer:
    """One trainer, so that its step is compiled once."""
    return trainer()


def fit(
    shared: Trainer,
    folder: Path | None,
    *callbacks: Any,
    at: int | None = None,
    **how: Any,
) -> tuple[TrainState, list[float]]:
    losses = Losses()
    shared.callbacks = [losses, *callbacks]
    shared.checkpoints = (
        None if folder is None else Checkpoints(folder, every=1, keep=Keep(last=1))
    )
    try:
        state = shared.fit(
            InterruptedRows(at),
            steps=STEPS,
            log_every=1,
            evaluations=held_out(),
            eval_every=2,
            **how,
        )
    finally:
        if shared.checkpoints is not None:
            shared.checkpoints.close()
    return state, losses.losses


@pytest.fixture(scope="module")
def whole(shared: Trainer) -> tuple[TrainState, list[float]]:
    return fit(shared, None)


def assert_same(left: TrainState, right: TrainState) -> None:
    for one, other in zip(
        jax.tree.leaves(left.variables), jax.tree.leaves(right.variables), strict=True
    ):
        np.testing.assert_array_equal(one, other)


PLACES: dict[str, tuple[list[Happens], int | None, list[int]]] = {
    # Hooks, the row before which it happens, and the commits that are saved then.
    "the first batch": ([], 0, []),
    "the start": ([Happens("start", 0, interrupt)], None, []),
    "the first commit": ([], 1, [1]),
    "a window after a save": ([], 4, [2]),
    "a log": ([Happens("log", 2, interrupt)], None, [2]),
    "a preview": ([Happens("preview", 2, interrupt)], None, [2]),
    "an evaluation's report": ([Happens("eval", 2, interrupt)], None, [2]),
    "a save": ([Happens("save", 2, interrupt)], None, [2]),
    "the last log": ([Happens("log", STEPS, interrupt)], None, [STEPS]),
    "the last save": ([Happens("save", STEPS, interrupt)], None, [STEPS]),
}


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_keeps_all_commits_and_the_run_resumes_bit_equal(
    tmp_path: Path,
    shared: Trainer,
    whole: tuple[TrainState, list[float]],
    place: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    callbacks, at, saved = PLACES[place]
    with pytest.raises(SystemExit) as left:
        fit(shared, tmp_path / "run", *callbacks, at=at)
    assert left.value.code == 130
    assert Checkpoints(tmp_path / "run").steps() == saved
    said = capfd.readouterr().err
    assert ("stopped by SIGINT" in said) == (place not in ("the first batch",))
    state, losses = fit(shared, tmp_path / "run", resume=True)
    assert losses == whole[1][saved[0] if saved else 0 :]
    assert_same(state, whole[0])


def test_without_checkpoints_a_signal_exits_and_says_that_nothing_was_saved(
    shared: Trainer, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        fit(shared, None, Happens("log", 2, interrupt))
    assert left.value.code == 130
    assert (
        "stopped by SIGINT after commit 2 of 4; nothing was saved, as the run has no "
        "checkpoints" in capfd.readouterr().err
    )


def test_a_run_that_is_stopped_again_before_it_goes_on_saves_nothing_twice(
    tmp_path: Path, shared: Trainer
) -> None:
    for at in (4, 4):
        with pytest.raises(SystemExit):
            fit(shared, tmp_path / "run", at=at, resume=True)
        assert Checkpoints(tmp_path / "run").steps() == [2]


def test_handlers_are_restored_and_not_installed_off_the_main_thread(
    shared: Trainer,
) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    fit(shared, None)
    during: list[object] = []
    look: Callable[[], None] = lambda: during.append(signal.getsignal(signal.SIGTERM))
    thread = threading.Thread(target=fit, args=(shared, None, Happens("log", 2, look)))
    thread.start()
    thread.join()
    assert during == [before[0]]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


ENDLESS = """
import jax
from dew.training.signals import stop_signals

def loop(x):
    return jax.lax.while_loop(lambda y: y > 0, lambda y: y * 3 % 101 + 1, x)

with stop_signals():
    print("started", flush=True)
    # Native code that never comes back to Python, as a compilation for long.
    jax.jit(loop)(1).block_until_ready()
"""


def test_a_second_ctrl_c_ends_a_process_at_once_in_native_code() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        try:
            # By then it is in the loop.
            time.sleep(2)
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()
