"""Reports of a command: a table for people, or one JSON object for programs."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
from rich.console import Console
from rich.table import Table

from dew.training.callbacks import Callback
from dew.training.logs import Log
from dew.training.progress import Progress
from dew.training.throughput import Meter


def show(
    title: str,
    rows: Iterable[tuple[str, str]],
    result: Mapping[str, object],
    as_json: bool,
) -> None:
    """Prints the rows as a table, or the result as one JSON object, to stdout.

    Of several processes the first alone prints.
    """
    if jax.process_index() > 0:
        return
    if as_json:
        print(json.dumps(_finite(result), allow_nan=False), flush=True)
        return
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def _finite(value: object) -> object:
    """Returns JSON values with null for numbers that are not finite: JSON has none."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Display(Callback):
    """Progress bar of a training run, which also records its figures for the report."""

    def __init__(self, console: Console, meter: Meter) -> None:
        self.console, self.meter = console, meter
        self.losses: list[float] = []
        self.terms: dict[str, list[float]] = {}
        self.tokens = 0
        self.evaluations: dict[int, dict[str, float]] = {}
        self._progress: Progress | None = None

    def on_start(self, step: int, steps: int) -> None:
        """Shows the progress bar and restarts the meter."""
        self._progress = Progress(steps, done=step, console=self.console)
        self._progress.__enter__()
        self.meter.restart()

    def on_log(self, log: Log) -> None:
        """Records an interval's losses and updates the progress bar."""
        self.losses += [commit.loss for commit in log.commits]
        for commit in log.commits:
            for name, value in commit.metrics.items():
                self.terms.setdefault(name, []).append(value)
        self.tokens += log.tokens
        self.meter.lap(steps=len(log.commits), tokens=log.tokens)
        if self._progress is not None:
            self._progress.update(log.step, {**log.metrics, **self.meter.metrics()})

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records and prints the metrics of an evaluation."""
        self.evaluations[step] = dict(metrics)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._note(f"step {step}: {shown}")
        self.meter.restart()

    def on_save(self, step: int) -> None:
        """Prints that a checkpoint is being written."""
        self._note(f"step {step}: checkpoint")
        self.meter.restart()

    def on_end(self, faults: Sequence[str]) -> None:
        """Removes the progress bar and prints the trackers' errors."""
        if self._progress is not None:
            self._progress.__exit__(None, None, None)
        for fault in faults:
            self.console.print(f"tracker: {fault}", markup=False)

    def _note(self, text: str) -> None:
        if self._progress is not None:
            self._progress.note(text)
