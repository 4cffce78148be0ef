"""A program of several processes that train together, well or not.

    python -m tests.support.parallel_runs ADDRESS COUNT INDEX FOLDER CASE …

Writes on stdout, as one line of JSON each, what every case gave in this process. A case
is its kind, and where it matters the process in which something happens, as `data 1`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dew.objectives.metrics import token_metrics
from dew.processes import agree_process_phase, connect_processes
from dew.training.callbacks import Callback
from dew.training.checkpoint import Checkpoints
from dew.training.evaluation import Evaluation
from dew.training.logs import Log
from dew.training.sharding import make_mesh
from dew.training.trainer import Trainer
from tests.support.runs import Losses, Rows, trainer

STEPS = 4
HELD_OUT = 5
"""Batches of the validation set, the last of five rows."""

Outcome = dict[str, Any]


def held_out() -> list[dict[str, Any]]:
    """The whole validation set, as one process reads it."""
    rows = Rows()
    batches = [next(rows) for _ in range(HELD_OUT)]
    return [*batches[:-1], {"tokens": batches[-1]["tokens"][:5]}]


def part_of_held_out(index: int, count: int) -> list[dict[str, Any]]:
    """Process 0 reads all but the last two batches, the others share those."""
    batches = held_out()
    if index == 0:
        return batches[:-2]
    return batches[-2:][index - 1 :: count - 1]


class Part(Rows):
    """This process's rows of every batch, which may fail or end at one of them."""

    def __init__(self, index: int, count: int, **settings: Any) -> None:
        self.fails_at: int | None = settings.pop("fails_at", None)
        super().__init__(**settings)
        self.span = slice(index * 8 // count, (index + 1) * 8 // count)

    def __next__(self) -> dict[str, Any]:
        if self.position == self.fails_at:
            raise KeyError("a row without text")
        return {"tokens": super().__next__()["tokens"][self.span]}


class FailingMetric:
    """A metric that fails in one process."""

    reads = token_metrics()["tokens"].reads

    def __call__(self, artifact: Any, /) -> float:
        raise ZeroDivisionError("a metric without a mass")

    def merge(self, accumulated: float, contribution: float, /) -> float:
        return accumulated + contribution

    def finalize(self, accumulated: float, /) -> float:
        return accumulated


class FailingTracker:
    """A tracker that cannot write."""

    name = "failing"

    def start(self, config: Mapping[str, object], *, step: int = 0) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError("no room for logs")

    def finish(self) -> tuple[str, ...]:
        return ()


class Happens(Callback):
    """Calls something at one hook, once `step` commits are made."""

    def __init__(self, hook: str, step: int, what: Callable[[], object]) -> None:
        self.hook, self.step, self.what = hook, step, what
        self.faults: list[str] = []

    def on_start(self, step: int, steps: int) -> None:
        self._at("start", step)

    def on_log(self, log: Log) -> None:
        self._at("log", log.step)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self._at("eval", step)

    def on_preview(self, step: int, name: str, preview: object) -> None:
        self._at("preview", step)

    def on_save(self, step: int) -> None:
        self._at("save", step)

    def on_end(self, faults: Any) -> None:
        self.faults = list(faults)

    def _at(self, hook: str, step: int) -> None:
        if (hook, step) == (self.hook, self.step):
            self.what()


def fail(message: str) -> Callable[[], object]:
    def raises() -> None:
        raise LookupError(message)

    return raises


class Here:
    """This process of the program, and the trainer that its cases share."""

    def __init__(self, index: int, count: int, folder: Path) -> None:
        self.index, self.count, self.folder = index, count, folder
        self.trainer: Trainer = trainer(
            mesh=make_mesh(data=count, fsdp=1) if count > 1 else None
        )

    def fit(
        self,
        name: str,
        *callbacks: Callback,
        data: Iterator[Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        evaluate: bool = False,
        **settings: Any,
    ) -> Outcome:
        """Trains, or says how training ended."""
        losses = Losses()
        self.trainer.callbacks = [*callbacks, losses]
        self.trainer.checkpoints = Checkpoints(self.folder / name, every=100)
        parts = part_of_held_out(self.index, self.count)
        evaluations = {
            "held_out": Evaluation(
                batches=lambda: parts if self.count > 1 else held_out(),
                metrics=metrics or token_metrics(),
            )
        }
        started = time.monotonic()
        outcome: Outcome = {}
        try:
            state = self.trainer.fit(
                data or Part(self.index, self.count),
                steps=STEPS,
                log_every=1,
                evaluations=evaluations if evaluate else None,
                **settings,
            )
        except SystemExit as left:
            outcome["code"] = left.code
        except Exception as fault:
            outcome["fault"] = f"{type(fault).__name__}: {fault}"
        else:
            whole = multihost_utils.process_allgather(state.variables, tiled=True)
            sums = jax.tree.map(lambda x: float(x.astype(np.float64).sum()), whole)
            outcome["sums"] = jax.tree.leaves(sums)
        outcome |= {
            "seconds": time.monotonic() - started,
            "losses": [loss.hex() for loss in losses.losses],
            "evaluations": {str(k): dict(v) for k, v in losses.evaluations.items()},
            "saved": self.trainer.checkpoints.steps(),
            "handlers": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        }
        self.trainer.checkpoints.close()
        return outcome

    def run(self, case: str) -> Outcome:
        kind, _, rank = case.partition(" ")
        is_here = rank == "" or int(rank) == self.index
        return getattr(self, f"case_{kind}")(case.replace(" ", "-"), is_here)

    def case_trains(self, name: str, _: bool) -> Outcome:
        return self.fit(name, evaluate=True)

    def case_fsdp(self, name: str, _: bool) -> Outcome:
        """Weights split over the processes, which no data axis does."""
        mesh, self.trainer.mesh = self.trainer.mesh, make_mesh(fsdp=self.count)
        outcome = self.fit(name, evaluate=True)
        self.trainer.mesh = mesh
        return outcome

    def case_data(self, name: str, is_here: bool) -> Outcome:
        part = Part(self.index, self.count, fails_at=3 if is_here else None)
        return self.fit(name, data=part)

    def case_ends(self, name: str, is_here: bool) -> Outcome:
        return self.fit(
            name, data=Part(self.index, self.count, end=5 if is_here else None)
        )

    def case_goes_on(self, name: str, _: bool) -> Outcome:
        """Continues the run of `ends`, whose window is open after its second commit."""
        return self.fit(name.replace("goes_on", "ends"), resume=True)

    def case_metric(self, name: str, is_here: bool) -> Outcome:
        metrics = {"metric": FailingMetric()} if is_here else token_metrics()
        return self.fit(name, metrics=metrics, evaluate=True)

    def case_preview(self, name: str, is_here: bool) -> Outcome:
        fails = Happens("preview", STEPS, fail("no font") if is_here else lambda: None)
        return self.fit(name, fails, evaluate=True)

    def case_own_phase(self, name: str, is_here: bool) -> Outcome:
        """A preview with a phase of its own before its collective."""
        fault = KeyError("no tree") if is_here else None

        def preview() -> None:
            agree_process_phase("drawing", fault)

        return self.fit(name, Happens("preview", STEPS, preview), evaluate=True)

    def case_callback(self, name: str, is_here: bool) -> Outcome:
        return self.fit(
            name, Happens("log", 2, fail("no log") if is_here else lambda: None)
        )

    def case_save(self, name: str, is_here: bool) -> Outcome:
        what = fail("no room") if is_here else lambda: None
        return self.fit(name, Happens("save", STEPS, what))

    def case_tracker(self, name: str, _: bool) -> Outcome:
        self.trainer.tracker = FailingTracker()
        noted = Happens("", 0, lambda: None)
        outcome = self.fit(name, noted)
        self.trainer.tracker = None
        return outcome | {"faults": noted.faults}

    def case_sigterm(self, name: str, is_here: bool) -> Outcome:
        return self.fit(name, *self._stop_at(2, is_here))

    def case_sigint(self, name: str, is_here: bool) -> Outcome:
        return self.fit(name, *self._stop_at(2, is_here, signal.SIGINT))

    def case_resumes(self, name: str, _: bool) -> Outcome:
        return self.fit(name.replace("resumes", "sigterm"), resume=True)

    def case_killed(self, name: str, is_here: bool) -> Outcome:
        return self.fit(name, *self._stop_at(2, is_here, signal.SIGKILL))

    def _stop_at(
        self, step: int, is_here: bool, number: signal.Signals = signal.SIGTERM
    ) -> list[Callback]:
        if not is_here:
            return []
        return [Happens("log", step, lambda: os.kill(os.getpid(), number))]


def main(address: str, count: str, index: str, folder: str, *cases: str) -> None:
    if int(count) > 1:
        connect_processes(address, count=int(count), index=int(index))
    here = Here(int(index), int(count), Path(folder))
    for case in cases:
        print(json.dumps({case: here.run(case)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
