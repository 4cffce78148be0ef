"""Trackers of a run's metrics: a JSONL file, TensorBoard, Weights & Biases, trackio.

    names = ("jsonl", "tensorboard")
    tracker = join_trackers(*(tracker_by_name(name, folder) for name in names))
    tracker.start(config, step=state.commits)
    tracker.log(10, {"loss": 2.3})
    faults = tracker.finish()

A tracker that throws never stops a run. `join_trackers` prints the fault once, with the
tracker's name, switches that tracker off for the rest of the run, and returns all such
faults from `finish`, for the run's summary. Only a tracker that cannot be built
(unknown name, missing package) is an error, and that is before the run.
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
    """A recorder of a run's metrics, called by the run's first process only."""

    @property
    def name(self) -> str:
        """The tracker's name in messages."""
        ...

    def start(self, config: Mapping[str, object], *, step: int = 0) -> None:
        """Opens the record of a run that has made `step` commits.

        With a `step` above 0 the existing record is continued; its entries of later
        steps, which were lost with the process, are dropped or overwritten. With 0 a
        new record begins. `config` holds JSON values.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records metrics as of `step` commits."""
        ...

    def finish(self) -> tuple[str, ...]:
        """Closes the record and returns its faults, one sentence each."""
        ...


class JSONL:
    """A file with one line of JSON for each call of `log`: `step`, then the metrics.

    Lines are in the file when `log` returns. A run that resumes at step s keeps the
    lines up to s, except a last one cut short, and drops those after s, which it will
    write again. A number that is not finite, which JSON lacks, is null. The config is
    not written, for `run.json` holds it.
    """

    name = "jsonl"

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, config: Mapping[str, object], *, step: int = 0) -> None:
        """Creates the file, or drops the lines that a resumed run writes again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = _lines_up_to(step, self.path) if step and self.path.exists() else []
        # Replaced at once: a kill between truncating and writing would lose the lines.
        draft = self.path.with_name(f"{self.path.name}.draft")
        draft.write_text("".join(lines), encoding="utf-8")
        os.replace(draft, self.path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line of JSON to the file."""
        values = {name: float(value) for name, value in metrics.items()}
        finite = {n: v if math.isfinite(v) else None for n, v in values.items()}
        # Opened for each line, so that no fault or kill leaves half a buffer behind.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")

    def finish(self) -> tuple[str, ...]:
        """Returns no faults: the file is closed between calls."""
        return ()


class TensorBoard:
    """TensorBoard event files, written without tensorflow and without torch.

    A resumed run writes another file, whose first event makes TensorBoard discard the
    later steps of earlier files.
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

    def start(self, config: Mapping[str, object], *, step: int = 0) -> None:
        """Creates an event file, with the config as a text summary named `config`."""
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
        """Returns no faults: the file is closed between calls."""
        return ()

    def _write(self, **fields: Any) -> None:
        """Appends one event to the file.

        Not by tensorboard's EventFileWriter, which writes in a thread, where a full
        disk goes unnoticed.
        """
        event = self._event.Event(wall_time=time.time(), **fields)
        with self._path.open("ab") as file:
            self._records.RecordWriter(file).write(event.SerializeToString())

    def _text(self, tag: str, config: Mapping[str, object]) -> Any:
        """Builds a summary that TensorBoard's text page shows as a code block."""
        text = "    " + json.dumps(config, indent=2).replace("\n", "\n    ")
        value = self._summary.Summary.Value(tag=tag)
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = self._types.DT_STRING
        value.tensor.string_val.append(text.encode())
        return self._summary.Summary(value=[value])


class WandB:
    """A Weights & Biases run; `mode="offline"` writes to `folder` without an account.

    Metrics are plotted over a `step` metric, so that a resumed run draws over the steps
    it lost, which wandb's own step would reject. The run's id is stored in `folder`, so
    that it resumes as the same run; offline, each process leaves a folder with that id,
    and `wandb sync` joins them.
    """

    name = "wandb"

    def __init__(
        self, folder: Path, *, project: str, run: str, mode: str | None = None
    ) -> None:
        self.folder, self.project, self.run, self.mode = folder, project, run, mode
        self._wandb = _extra("wandb", "wandb")

    def start(self, config: Mapping[str, object], *, step: int = 0) -> None:
        """Opens a new run, or the stored one where it resumes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        id_file = self.folder / "wandb_id"
        if not (step and id_file.exists()):
            id_file.write_text(uuid.uuid4().hex[:12])
        self._run = self._wandb.init(
            project=self.project,
            name=self.run,
            id=id_file.read_text(),
            resume="allow",
            config=dict(config),
            dir=str(self.folder),
            mode=self.mode,
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends one row of metrics to wandb."""
        self._run.log({"step": step, **metrics})

    def finish(self) -> tuple[str, ...]:
        """Closes the run; the offline file is complete once the process has ended."""
        self._run.finish()
        return ()


class Trackio:
    """A trackio run in the local store, whose folder `TRACKIO_DIR` sets.

    A store never drops rows, so a run that resumes continues under a second name, which
    includes the step.
    """

    name = "trackio"

    def __init__(self, *, project: str, run: str) -> None:
        self.project, self.run = project, run
        self._trackio = _extra("trackio", "trackio")

    def start(self, config: Mapping[str, object], *, step: int = 0) -> None:
        """Opens the run in the local store."""
        # trackio prints a greeting to stdout, which is for the command's own output.
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
        """Writes one row of metrics to the store."""
        self._run.log(dict(metrics), step=step)

    def finish(self) -> tuple[str, ...]:
        """Waits until every row is in the store and closes the run."""
        with redirect_stdout(sys.stderr):
            # Not the run's own finish, after which trackio finishes it again at exit.
            self._trackio.finish()
        return ()


class TrackerGroup:
    """Trackers that get the same calls, each switched off by its first fault."""

    name = "several"

    def __init__(self, trackers: tuple[Tracker, ...], console: Console) -> None:
        self.trackers, self._console = trackers, console
        self._faults: dict[Tracker, str] = {}

    def start(self, config: Mapping[str, object], *, step: int = 0) -> None:
        """Opens the record of every tracker."""
        for tracker in self._enabled():
            with self._guard(tracker):
                tracker.start(config, step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs to every tracker that has had no fault."""
        for tracker in self._enabled():
            with self._guard(tracker):
                tracker.log(step, metrics)

    def finish(self) -> tuple[str, ...]:
        """Closes every working tracker; returns the faults of the whole run."""
        faults: list[str] = []
        for tracker in self._enabled():
            with self._guard(tracker):
                faults.extend(tracker.finish())
        return (*self._faults.values(), *faults)

    def _enabled(self) -> list[Tracker]:
        return [tracker for tracker in self.trackers if tracker not in self._faults]

    def _guard(self, tracker: Tracker) -> ExitStack:
        """Returns a context that swallows an exception and switches `tracker` off."""

        def switch_off(
            kind: type[BaseException] | None,
            fault: BaseException | None,
            trace: TracebackType | None,
        ) -> bool:
            # Not only OSError: these are third-party packages and users' classes, and
            # none of their faults is worth a run. Interrupts still pass.
            if not isinstance(fault, Exception):
                return False
            message = f"{tracker.name}: {type(fault).__name__}: {fault}"
            self._faults[tracker] = message
            self._console.print(
                f"tracker {message}\nIt is off for the rest of the run, which goes on.",
                style="bold red",
                markup=False,
                soft_wrap=True,
            )
            return True

        stack = ExitStack()
        stack.push(switch_off)
        return stack


def join_trackers(*trackers: Tracker, console: Console | None = None) -> TrackerGroup:
    """Joins trackers into one that never throws.

    Faults are printed to `console`, or to stderr where None.
    """
    return TrackerGroup(trackers, console or Console(stderr=True))


TRACKERS: Mapping[str, Callable[[Path, str, str], Tracker]] = {
    "jsonl": lambda folder, project, run: JSONL(folder / "metrics.jsonl"),
    "tensorboard": lambda folder, project, run: TensorBoard(folder / "tensorboard"),
    "wandb": lambda folder, project, run: WandB(folder, project=project, run=run),
    "trackio": lambda folder, project, run: Trackio(project=project, run=run),
}
"""Builders by the names of the command line; they take log folder, project, run."""


def tracker_by_name(
    name: str, folder: Path, *, project: str = "dew", run: str | None = None
) -> Tracker:
    """Builds the tracker of that name; those that write files do so in `folder`.

    `run` is the name of the folder above `folder` where None: `runs/a/logs` is run `a`.

    Raises:
        ValueError: no tracker has that name.
        ImportError: its package is missing; the message names what to install.
    """
    if name not in TRACKERS:
        raise ValueError(
            f"no tracker is called {name!r}; choose from {', '.join(TRACKERS)}"
        )
    return TRACKERS[name](folder, project, run or folder.resolve().parent.name)


def _lines_up_to(step: int, path: Path) -> list[str]:
    """Returns the complete lines of steps up to `step`."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # A kill can only have cut the last line.
    complete = [line for line in lines if line.endswith("\n")]
    return [line for line in complete if json.loads(line)["step"] <= step]


def _extra(module: str, extra: str) -> ModuleType:
    """Imports a module of an optional package."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"the {extra} tracker needs {missing.name}, which is not installed; run "
            f"pip install 'dew-bridge[{extra}]'"
        ) from missing
