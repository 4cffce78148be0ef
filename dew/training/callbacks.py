"""Callbacks: hooks that a training run calls as it proceeds."""

from collections.abc import Mapping, Sequence
from typing import Any

from dew.training.logs import Log


class Callback:
    """What happens beside a run; override what is of interest."""

    def on_start(self, step: int, steps: int) -> None:
        """The run starts at commit `step` and goes on to `steps`."""

    def on_log(self, log: Log) -> None:
        """Numbers of the commits since the last log are there."""

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """A validation pass has ended; metrics are named `set/metric`."""

    def on_preview(self, step: int, name: str, shown: Any) -> None:
        """`Objective.preview` of a set's first batch; every process is told."""

    def on_save(self, step: int) -> None:
        """The checkpoint of this commit is being written."""

    def on_end(self, faults: Sequence[str]) -> None:
        """The run has ended, well or not; `faults` are the trackers'."""
