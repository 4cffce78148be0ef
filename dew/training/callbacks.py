"""Callbacks: hooks that a training run calls as it proceeds."""

from collections.abc import Mapping, Sequence

from dew.training.logs import Log


class Callback:
    """Hooks that a run calls in every process; override the ones of interest."""

    def on_start(self, step: int, steps: int) -> None:
        """Called when the run starts at commit `step`, to end at `steps`."""

    def on_log(self, log: Log) -> None:
        """Called with the metrics of the commits since the last log."""

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a validation pass; metrics are named `set/metric`."""

    def on_preview(self, step: int, name: str, preview: object) -> None:
        """Called with `Objective.preview` of a set's first batch, if it shows any."""

    def on_save(self, step: int) -> None:
        """Called when the checkpoint of commit `step` is being written."""

    def on_end(self, faults: Sequence[str]) -> None:
        """Called when the run has ended, well or not; `faults` are the trackers'."""
