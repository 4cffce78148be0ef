"""Trackers read back by their own readers, real faults, and the figures of a run."""

import io
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dew.training.progress import Progress
from dew.training.throughput import (
    Meter,
    flops_per_token,
    peak_flops,
    peak_memory_bytes,
)
from dew.training.trackers import (
    JSONL,
    TensorBoard,
    Tracker,
    join_trackers,
    tracker_by_name,
)

CONFIG = {"learning_rate": 1e-3, "model": {"layers": 2}}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Lets no file of this process grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def log_steps(tracker: Tracker, first: int, last: int, *, start: int = 0) -> None:
    tracker.start(CONFIG, step=start)
    for step in range(first, last + 1):
        tracker.log(step, {"loss": 1.0 / step, "learning_rate": 0.5})


def test_jsonl_writes_one_line_a_step(tmp_path: Path) -> None:
    tracker = JSONL(tmp_path / "logs" / "metrics.jsonl")
    log_steps(tracker, 1, 2)
    assert lines(tracker.path) == [
        {"step": 1, "loss": 1.0, "learning_rate": 0.5},
        {"step": 2, "loss": 0.5, "learning_rate": 0.5},
    ]
    assert tracker.finish() == ()


def test_a_number_that_is_not_finite_is_null_in_jsonl(tmp_path: Path) -> None:
    tracker = JSONL(tmp_path / "metrics.jsonl")
    tracker.start({})
    tracker.log(1, {"loss": float("nan"), "grad_norm": float("inf")})
    assert lines(tracker.path) == [{"step": 1, "loss": None, "grad_norm": None}]


def test_a_resumed_jsonl_holds_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(JSONL(path), 1, 7)
    with path.open("a") as file:
        file.write('{"step": 8, "lo')
    log_steps(JSONL(path), 5, 9, start=4)
    assert [line["step"] for line in lines(path)] == list(range(1, 10))


def test_a_run_from_the_start_begins_a_new_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(JSONL(path), 1, 7)
    log_steps(JSONL(path), 1, 2)
    assert [line["step"] for line in lines(path)] == [1, 2]


def read_tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    return reader.Reload()


def test_tensorboard_reads_its_scalars_and_the_config(tmp_path: Path) -> None:
    log_steps(TensorBoard(tmp_path), 1, 3)
    reader = read_tensorboard(tmp_path)
    got = [(event.step, event.value) for event in reader.Scalars("loss")]
    assert got == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    text = reader.Tensors("config")[0].tensor_proto.string_val[0]
    assert json.loads(text) == CONFIG


def test_a_resumed_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    log_steps(TensorBoard(tmp_path), 1, 7)
    log_steps(TensorBoard(tmp_path), 5, 9, start=4)
    steps = [event.step for event in read_tensorboard(tmp_path).Scalars("loss")]
    assert steps == list(range(1, 10))


def test_tensorboard_needs_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from dew.training.trackers import tracker_by_name
tracker = tracker_by_name("tensorboard", Path({str(tmp_path)!r}))
tracker.start({{}})
tracker.log(1, {{"loss": 1.0}})
print(sorted({{"torch", "tensorflow"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_wandb_writes_offline_and_resumes_under_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = f"""
from pathlib import Path
from dew.training.trackers import tracker_by_name
for step in (0, 2):
    tracker = tracker_by_name("wandb", Path({str(tmp_path)!r}), run="a run")
    tracker.start({{"learning_rate": 1.0}}, step=step)
    tracker.log(step + 1, {{"loss": 12345.5 * (step + 1)}})
    tracker.finish()
"""
    # Read after the process: wandb's own may write a little after `finish`.
    settings = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | settings)
    kept = [path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/*.wandb")]
    run_id = (tmp_path / "wandb_id").read_bytes()
    assert len(kept) == 2
    assert all(run_id in data and b"loss" in data for data in kept)
    # Numbers that no time or load that wandb notes by itself will be.
    assert {b"12345.5" in data for data in kept} == {True, False}
    assert {b"37036.5" in data for data in kept} == {True, False}


def test_trackio_stores_rows_on_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    code = f"""
from pathlib import Path
from dew.training.trackers import tracker_by_name
for step in (0, 2):
    tracker = tracker_by_name("trackio", Path({str(tmp_path)!r}), project="p", run="a")
    tracker.start({{"lr": 1.0}}, step=step)
    tracker.log(step + 1, {{"loss": 0.125}})
    tracker.finish()
from trackio.sqlite_storage import SQLiteStorage
for run in ("a", "a, from step 2"):
    print([(row["step"], row["loss"]) for row in SQLiteStorage.get_logs("p", run)])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"TRACKIO_DIR": str(tmp_path / "store")},
    )
    assert done.stdout.splitlines() == ["[(1, 0.125)]", "[(3, 0.125)]"], done.stderr


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("tensorboard", "tensorboard.compat.proto.event_pb2"),
        ("wandb", "wandb"),
        ("trackio", "trackio"),
    ],
)
def test_a_missing_package_says_what_to_install(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'dew-bridge\[{name}\]'"):
        tracker_by_name(name, tmp_path)


def test_an_unknown_tracker_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mlflow'; choose from jsonl, tensorboard"):
        tracker_by_name("mlflow", tmp_path)


def test_a_full_disk_switches_a_tracker_off_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    console = Console(file=io.StringIO())
    full, other = JSONL(tmp_path / "full.jsonl"), JSONL(tmp_path / "other.jsonl")
    both = join_trackers(full, other, console=console)
    both.start(CONFIG)
    full.path.write_text(" " * 4096)
    with full_disk(4096):
        both.log(1, {"loss": 1.0})
        both.log(2, {"loss": 0.5})
    both.log(3, {"loss": 0.25})
    (fault,) = both.finish()
    assert re.match(r"jsonl: OSError: .*File too large", fault)
    assert console.file.getvalue().count(fault) == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert [line["step"] for line in lines(other.path)] == [1, 2, 3]
    assert full.path.read_text().strip() == ""


@pytest.mark.parametrize("name", ["jsonl", "tensorboard"])
def test_a_folder_that_cannot_be_written_never_stops_a_run(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    tracker = join_trackers(
        tracker_by_name(name, tmp_path / "logs"), console=Console(quiet=True)
    )
    log_steps(tracker, 1, 2)
    (fault,) = tracker.finish()
    assert fault.startswith(f"{name}: ")


class Raising(JSONL):
    """A user's own tracker with a slip in it."""

    fault: BaseException

    def log(self, step: int, metrics: Any) -> None:
        raise self.fault


def test_a_slip_in_a_users_tracker_never_stops_a_run(tmp_path: Path) -> None:
    slip = Raising(tmp_path / "metrics.jsonl")
    slip.fault = KeyError("loss")
    tracker = join_trackers(join_trackers(slip, console=Console(quiet=True)))
    log_steps(tracker, 1, 2)
    assert tracker.finish() == ("jsonl: KeyError: 'loss'",)


def test_an_interrupt_is_not_taken_for_a_fault(tmp_path: Path) -> None:
    interrupted = Raising(tmp_path / "metrics.jsonl")
    interrupted.fault = KeyboardInterrupt()
    tracker = join_trackers(interrupted)
    tracker.start({})
    with pytest.raises(KeyboardInterrupt):
        tracker.log(1, {})


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_meter_leaves_the_first_step_out_of_the_median() -> None:
    clock = Clock()
    meter = Meter(flops=10.0, peak=4000.0, clock=clock)
    assert meter.tokens_per_second is None
    for seconds, steps in ((30.0, 1), (2.0, 2), (8.0, 2), (4.0, 2)):
        clock.now += seconds
        meter.lap(steps=steps, tokens=400 * steps)
    assert meter.first_step_seconds == 30.0
    assert meter.tokens_per_second == 200.0
    assert meter.metrics() == {"tokens_per_second": 200.0, "mfu": 0.5}


def test_no_lap_pays_for_what_came_before_a_restart() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    meter.lap(steps=1, tokens=1)
    clock.now += 100.0
    meter.restart()
    clock.now += 1.0
    meter.lap(steps=1, tokens=50)
    assert meter.metrics() == {"tokens_per_second": 50.0}


def test_flops_count_products_and_attention() -> None:
    # One block by hand: 3 products of a [64, 64] weight, scores and mix over 32 keys.
    by_hand = 3 * (3 * 2 * 64 * 64 + 2 * 2 * 64 * 32)
    got = flops_per_token(3 * 64 * 64, layers=1, attention_width=64, seq=32)
    assert got == by_hand


def test_peaks_add_up_and_an_unknown_device_leaves_none() -> None:
    assert peak_flops(["NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"]) == 756e12 + 989e12
    assert peak_flops(["NVIDIA L40S"]) == 362e12
    assert peak_flops(["TPU v5 lite"]) == 197e12
    assert peak_flops(["TPU v4", "cpu"]) is None
    assert peak_flops([]) is None


def test_peak_memory_is_the_process_own_and_not_its_parents() -> None:
    ballast = bytearray(300_000_000)
    ballast[::4096] = b"\1" * len(range(0, len(ballast), 4096))
    before = peak_memory_bytes()
    assert before > len(ballast)
    code = "from dew.training.throughput import peak_memory_bytes as p; print(p())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert 0 < int(done.stdout) < len(ballast)


def shown(console: Console, updates: int) -> str:
    """Shows a run from step 10 of 20 that takes 4 seconds a step, the first 60."""
    clock = Clock()
    with Progress(20, done=10, console=console, clock=clock) as progress:
        for i in range(updates):
            clock.now += 4.0 if i else 60.0
            progress.update(11 + i, {"loss": 2.5, "learning_rate": 1e-3, "kl": 1.0})
        progress.note("saved checkpoint [13]")
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_progress_off_a_terminal_is_one_plain_line_an_update() -> None:
    text = shown(Console(file=io.StringIO(), width=40), updates=2)
    assert text.splitlines() == [
        "step 11/20  loss 2.5000  lr 1.00e-03",
        "step 12/20  loss 2.5000  lr 1.00e-03  0:00:32 left",
        "saved checkpoint [13]",
    ]


def test_progress_on_a_terminal_is_a_bar() -> None:
    console = Console(
        file=io.StringIO(), width=100, force_terminal=True, force_interactive=True
    )
    text = shown(console, updates=2)
    assert "12/20" in text
    assert "loss 2.5000  lr 1.00e-03  0:00:32 left" in text
    assert "step 12/20" not in text
