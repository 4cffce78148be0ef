"""Where the numbers of a run go: a JSONL file, TensorBoard, Weights & Biases, trackio.

    tracker = several(*(named(name, folder) for name in ("jsonl", "tensorboard")))
    tracker.start(config, step=state.commits)
    tracker.log(10, {"loss": 2.3})
    faults = tracker.finish()

A tracker that throws never stops a run. `several` says so on the console, once, with
the tracker's name, switches that one off for the rest of the run, and returns every
such fault from `finish`, so that the run's summary can name it. Only a tracker that
cannot be built (unknown name, missing package) is an error, and that is before the run.
"""

import importlib
import json
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol, runtime_checkable

from rich.console import Console


@runtime_checkable
class Tracker(Protocol):
    """What a run tells its numbers to; the first process of a run calls it alone.

    `name` is how messages call it.
    """

    @property
    def name(self) -> str:
        """The tracker's name."""
        ...

    def start(self, config: Mapping[str, Any], *, step: int = 0) -> None:
        """Opens the record of a run that stands at `step` commits.

        A `step` above 0 goes on with what is there, and what it says of later steps,
        which were lost with the process, is dropped or overwritten. 0 begins anew.
        `config` holds what JSON can.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records metrics as of `step` commits."""
        ...

    def finish(self) -> tuple[str, ...]:
        """Closes the record and returns, a sentence each, what went wrong with it."""
        ...


class JSONL:
    """One line of JSON for each call of `log`: `step`, then the metrics.

    Lines are in the file when `log` returns. A run that resumes at step s keeps the
    lines up to s, but for a last one cut short, and loses those after s, which it will
    write again. A number that is not finite, which JSON lacks, is null. The config is
    not written: it stands in `run.json`.
    """

    name = "jsonl"

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, config: Mapping[str, Any], *, step: int = 0) -> None:
        """Opens the file, without the lines that the run will write again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_up_to(step, self.path) if step and self.path.exists() else []
        # Replaced at once: a kill between truncating and writing would lose the lines.
        draft = self.path.with_name(f"{self.path.name}.draft")
        draft.write_text("".join(kept), encoding="utf-8")
        os.replace(draft, self.path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line."""
        values = {name: float(value) for name, value in metrics.items()}
        finite = {n: v if math.isfinite(v) else None for n, v in values.items()}
        # Opened for each line, so that no fault or kill leaves half a buffer behind.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")

    def finish(self) -> tuple[str, ...]:
        """Has nothing left to do."""
        return ()


class TensorBoard:
    """Scalars for TensorBoard, written without tensorflow and without torch.

    A resumed run writes a file of its own, whose head tells TensorBoard to forget what
    earlier files say of later steps.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._event = _extra("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = _extra("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._types = _extra("tensorboard.compat.proto.types_pb2", "tensorboard")
        self._records = _extra(
            "tensorboard.summary.writer.record_writer", "tensorboard"
        )

    def start(self, config: Mapping[str, Any], *, step: int = 0) -> None:
        """Opens an event file; the config becomes a text of the same name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unique = f"{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._path = self.folder / f"events.out.tfevents.{unique}"
        self._write(file_version="brain.Event:2")
        if step:
            session = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(step=step + 1, session_log=session)
        self._write(step=step, summary=self._text("config", config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one event with a scalar for each metric."""
        scalars = [
            self._summary.Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
        ]
        self._write(step=step, summary=self._summary.Summary(value=scalars))

    def finish(self) -> tuple[str, ...]:
        """Has nothing left to do."""
        return ()

    def _write(self, **fields: Any) -> None:
        """Appends one event.

        Not by tensorboard's EventFileWriter: that one writes in a thread, where a full
        disk goes unseen.
        """
        event = self._event.Event(wall_time=time.time(), **fields)
        with self._path.open("ab") as file:
            self._records.RecordWriter(file).write(event.SerializeToString())

    def _text(self, tag: str, config: Mapping[str, Any]) -> Any:
        """A summary that TensorBoard's text page shows as a block of code."""
        text = "    " + json.dumps(config, indent=2).replace("\n", "\n    ")
        value = self._summary.Summary.Value(tag=tag)
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = self._types.DT_STRING
        value.tensor.string_val.append(text.encode())
        return self._summary.Summary(value=[value])


class WandB:
    """Weights & Biases; `mode="offline"` writes to `folder` and needs no account.

    Metrics are plotted over a `step` of their own, so that a resumed run draws over the
    steps it lost instead of having them refused. The run's id is kept in `folder`, so
    that it resumes as the same run; offline, each process leaves a folder with that id,
    and `wandb sync` joins them.
    """

    name = "wandb"

    def __init__(
        self, folder: Path, *, project: str, run: str, mode: str | None = None
    ) -> None:
        self.folder, self.project, self.run, self.mode = folder, project, run, mode
        self._wandb = _extra("wandb", "wandb")

    def start(self, config: Mapping[str, Any], *, step: int = 0) -> None:
        """Opens the run, the old one where it resumes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        known = self.folder / "wandb_id"
        if not (step and known.exists()):
            known.write_text(uuid.uuid4().hex[:12])
        self._run = self._wandb.init(
            project=self.project,
            name=self.run,
            id=known.read_text(),
            resume="allow",
            config=dict(config),
            dir=str(self.folder),
            mode=self.mode,
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends one row."""
        self._run.log({"step": step, **metrics})

    def finish(self) -> tuple[str, ...]:
        """Closes the run; the offline file is whole when the process has ended."""
        self._run.finish()
        return ()


class Trackio:
    """Trackio, whose store on this machine `TRACKIO_DIR` places.

    A store keeps every row it was ever told, so a run that resumes goes on under a name
    of its own, which says the step.
    """

    name = "trackio"

    def __init__(self, *, project: str, run: str) -> None:
        self.project, self.run = project, run
        self._trackio = _extra("trackio", "trackio")

    def start(self, config: Mapping[str, Any], *, step: int = 0) -> None:
        """Opens the run in the local store."""
        # It greets on stdout, which belongs to what the command prints.
        with redirect_stdout(sys.stderr):
            self._run = self._trackio.init(
                project=self.project,
                name=f"{self.run}, from step {step}" if step else self.run,
                config=dict(config),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends one row."""
        self._run.log(dict(metrics), step=step)

    def finish(self) -> tuple[str, ...]:
        """Closes the run, once all of it is in the store."""
        with redirect_stdout(sys.stderr):
            # Not the run's own finish, after which trackio finishes it again at exit.
            self._trackio.finish()
        return ()


class TrackerGroup:
    """Trackers side by side, each switched off by its first fault; see the module."""

    name = "several"

    def __init__(self, trackers: tuple[Tracker, ...], console: Console) -> None:
        self.trackers, self._console = trackers, console
        self._faults: dict[Tracker, str] = {}

    def start(self, config: Mapping[str, Any], *, step: int = 0) -> None:
        """Starts each of them."""
        for tracker in self._working():
            with self._guarding(tracker):
                tracker.start(config, step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tells each that still works."""
        for tracker in self._working():
            with self._guarding(tracker):
                tracker.log(step, metrics)

    def finish(self) -> tuple[str, ...]:
        """Closes those that still work; returns the faults of the whole run."""
        told: list[str] = []
        for tracker in self._working():
            with self._guarding(tracker):
                told.extend(tracker.finish())
        return (*self._faults.values(), *told)

    def _working(self) -> list[Tracker]:
        return [tracker for tracker in self.trackers if tracker not in self._faults]

    def _guarding(self, tracker: Tracker) -> ExitStack:
        """A block that any exception of `tracker` leaves quietly, and for good."""

        def switch_off(
            kind: type[BaseException] | None,
            fault: BaseException | None,
            trace: TracebackType | None,
        ) -> bool:
            # Not only OSError: these are other people's packages and users' classes,
            # and none of their faults is worth a run. Interrupts still pass.
            if not isinstance(fault, Exception):
                return False
            said = f"{tracker.name}: {type(fault).__name__}: {fault}"
            self._faults[tracker] = said
            self._console.print(
                f"tracker {said}\nIt is off for the rest of the run, which goes on.",
                style="bold red",
                markup=False,
                soft_wrap=True,
            )
            return True

        stack = ExitStack()
        stack.push(switch_off)
        return stack


def several(*trackers: Tracker, console: Console | None = None) -> TrackerGroup:
    """Joins trackers into one that never throws; `console` is stderr where None."""
    return TrackerGroup(trackers, console or Console(stderr=True))


TRACKERS: Mapping[str, Callable[[Path, str, str], Tracker]] = {
    "jsonl": lambda folder, project, run: JSONL(folder / "metrics.jsonl"),
    "tensorboard": lambda folder, project, run: TensorBoard(folder / "tensorboard"),
    "wandb": lambda folder, project, run: WandB(folder, project=project, run=run),
    "trackio": lambda folder, project, run: Trackio(project=project, run=run),
}
"""Builders by the names of the command line, of log folder, project and run."""


def named(
    name: str, folder: Path, *, project: str = "dew", run: str | None = None
) -> Tracker:
    """Builds the tracker of that name, writing to `folder` where it writes files.

    `run` is the name of the folder above `folder` where None: `runs/a/logs` is run `a`.

    Raises:
        ValueError: no tracker has that name.
        ImportError: its package is missing; the message says what to install.
    """
    if name not in TRACKERS:
        raise ValueError(
            f"no tracker is called {name!r}; choose from {', '.join(TRACKERS)}"
        )
    return TRACKERS[name](folder, project, run or folder.resolve().parent.name)


def _lines_up_to(step: int, path: Path) -> list[str]:
    """The whole lines of steps up to `step`."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # A kill can only have cut the last line.
    whole = [line for line in lines if line.endswith("\n")]
    return [line for line in whole if json.loads(line)["step"] <= step]


def _extra(module: str, extra: str) -> ModuleType:
    """Imports a module of an optional package."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"the {extra} tracker needs {missing.name}, which is not installed; run "
            f"pip install 'dew-bridge[{extra}]'"
        ) from missing
