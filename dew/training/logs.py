"""Step reports, kept on the devices and read only when a log is due.

Reading waits for the device, so a read after every step would leave it idle between
steps.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.console import Console

from dew.training.step import Report
from dew.tree import flatten, slashed
from dew.typing import Variables


class TrainingError(RuntimeError):
    """A run that cannot go on; the message names the commit and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One optimizer update: its number, counted from 1, and its measurements."""

    step: int
    loss: float
    mass: float
    grad_norm: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Log:
    """The commits since the last log, and metrics over that interval.

    `metrics` holds loss and the objective's metrics, averaged by mass, `grad_norm` of
    the last commit, `learning_rate`, `tokens_per_second`, and the counts of `rejected`
    microbatches and `dropped` windows if there were any.
    """

    step: int
    commits: tuple[Commit, ...]
    metrics: Mapping[str, float]
    seconds: float
    tokens: int


MAX_EMPTY = 100
"""Windows in a row without support after which a run stops: it would never end."""


def tell(text: str) -> None:
    """Prints a line on stderr, in the first process of a run."""
    console = Console(stderr=True, quiet=jax.process_index() > 0)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class RunLog:
    """Buffers the reports of dispatched steps on device and reads them at log time.

    `read` raises where `max_rejections` attempts or `MAX_EMPTY` windows in a row did
    not update the weights. `objective` is the name by which it speaks of the loss.
    """

    def __init__(self, max_rejections: int, objective: str = "the objective") -> None:
        self._max_rejections = max_rejections
        self._objective = objective
        self._told_stray = False
        self._pending: list[Report] = []
        self._commits: list[Commit] = []
        self._rejected = 0
        self._dropped = 0
        self._empty = 0
        self._tokens = 0
        self._since = time.perf_counter()

    def add(self, report: Report, tokens: int) -> None:
        """Buffers one dispatched step's report without waiting for its values."""
        self._pending.append(report)
        self._tokens += tokens

    def read(self, commits: int, params: Variables) -> None:
        """Waits for all pending reports; `commits` is the count before them.

        `params` gives the names of the leaves whose gradients are not finite.

        Raises:
            TrainingError: too many microbatches or windows in a row were rejected or
                dropped, or had no support.
        """
        pending, self._pending = self._pending, []
        for report in jax.device_get(pending):
            self._tell_stray(commits, report)
            if report.committed:
                commits += 1
                self._commits.append(_commit(commits, report))
            self._rejected += not report.accepted
            self._dropped += bool(report.full and not report.committed)
            if report.full:
                self._empty = 0 if report.committed else self._empty + 1
            if self._empty >= MAX_EMPTY:
                raise TrainingError(
                    f"stopped after commit {commits}: {MAX_EMPTY} windows in a row "
                    "updated nothing; of the last, the loss counts a mass of "
                    f"{report.mass}. Are all targets masked?"
                )
            if max(report.rejected, report.dropped) >= self._max_rejections:
                raise TrainingError(self._stop_reason(commits, report, params))

    def close(self, learning_rate: float | None) -> Log:
        """Returns the log of this interval and starts the next one."""
        now = time.perf_counter()
        commits, seconds, tokens = tuple(self._commits), now - self._since, self._tokens
        metrics = _averages(commits)
        if learning_rate is not None:
            metrics["learning_rate"] = learning_rate
        metrics["tokens_per_second"] = tokens / seconds
        if self._rejected or self._dropped:
            metrics |= {"rejected": self._rejected, "dropped": self._dropped}
        self._commits, self._rejected, self._dropped, self._tokens = [], 0, 0, 0
        self._since = now
        return Log(
            step=commits[-1].step,
            commits=commits,
            metrics=metrics,
            seconds=seconds,
            tokens=tokens,
        )

    def skip(self, seconds: float) -> None:
        """Excludes time that was not spent on steps, such as an evaluation's."""
        self._since += seconds

    def restart(self) -> None:
        """Starts the clock of the first interval, after all that precedes the loop."""
        self._since = time.perf_counter()

    def _tell_stray(self, commits: int, report: Report) -> None:
        """Says once a run that statistics without mass had a total."""
        if self._told_stray or not report.stray:
            return
        self._told_stray = True
        tell(
            f"{self._objective}.loss gave a batch after commit {commits} statistics "
            "without mass whose total is not 0, or not finite; zero mass declares a "
            "zero total, so it is left out of loss and gradient, as all further ones "
            "are. Does a mask reach the loss of every position?"
        )

    def _stop_reason(self, commits: int, report: Report, params: Variables) -> str:
        """Writes the commit, the count, and what was not finite in the last attempt."""
        where = f"after commit {commits}"
        if report.dropped >= self._max_rejections:
            why = (
                f"its value is {report.loss} over a mass of {report.mass}, "
                f"its gradient's norm {report.grad_norm}"
            )
            return (
                f"stopped {where}: {report.dropped} windows in a row could not be "
                f"committed; of the last, {why}. Are all targets masked?"
            )
        names = ", ".join(_not_finite(report.finite, params)) or "nothing"
        stopped = (
            f"stopped {where}: {report.rejected} microbatches in a row were rejected; "
            f"in the last, not finite: {names}. "
        )
        if commits == 0:
            return stopped + (
                "No update was made yet, so the cause is in the data or in the weights "
                "that training started from"
            )
        return stopped + (
            "The weights are as that commit left them; lower the learning rate, or "
            "look at the data"
        )


def _commit(step: int, report: Report) -> Commit:
    return Commit(
        step=step,
        loss=float(report.loss),
        mass=float(report.mass),
        grad_norm=float(report.grad_norm),
        metrics={name: float(value) for name, value in report.metrics.items()},
    )


def _averages(commits: tuple[Commit, ...]) -> dict[str, float]:
    """Averages loss and metrics by mass, and takes the last gradient norm."""
    weights = np.array([c.mass for c in commits])
    metrics = {"loss": float(np.average([c.loss for c in commits], weights=weights))}
    for name in commits[-1].metrics:
        values = np.array([c.metrics[name] for c in commits])
        # NaN marks a window in which nothing was measured.
        measured = np.isfinite(values)
        if measured.any():
            metrics[name] = float(
                np.average(values[measured], weights=weights[measured])
            )
    return {**metrics, "grad_norm": commits[-1].grad_norm}


def _not_finite(finite: Mapping[str, Any], params: Variables) -> list[str]:
    """Returns the names of the leaves whose flag is false."""
    names = []
    for part in ("statistics", "metrics", "variables", "effects"):
        for path, flag in jax.tree_util.tree_flatten_with_path(finite[part])[0]:
            if not flag:
                key = jax.tree_util.keystr(path, simple=True, separator="/")
                names.append(f"{part}/{key}" if key else part)
    paths = list(flatten({"params": params}))
    bad = [
        slashed(p) for p, ok in zip(paths, finite["gradient"], strict=False) if not ok
    ]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        names.append("gradient of " + ", ".join(bad[:3]) + more)
    return names
