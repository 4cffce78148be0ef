"""A progress bar for a training run, with its current metrics.

meter = Meter(flops=flops_per_token(…), peak=peak_flops(jax.devices()))
with Progress(steps, done=state.commits) as progress:
    for …:                            # at each log interval, its values fetched
        meter.lap(steps=…, tokens=…)
        progress.update(step, {**metrics, **meter.metrics()})
        progress.note("saved checkpoint 40")
"""

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

SHOWN: Mapping[str, str] = {
    "loss": "loss {:.4f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "learning_rate": "lr {:.2e}",
    "grad_norm": "grad norm {:.3g}",
    "mfu": "MFU {:.1%}",
}
"""The metrics that are shown if a run has them; trackers record all."""


class Progress:
    """A progress bar on a terminal; elsewhere one plain line for each update.

    A context manager, which removes the bar on leaving. `total` and `done` are commits.
    The time left is estimated from the second update on, without the compilation.
    """

    def __init__(
        self,
        total: int,
        *,
        done: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total, self._clock = total, clock
        self._console = console or Console(stderr=True)
        self._first: tuple[int, float] | None = None
        self._bar = Bar(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not self._console.is_interactive,
        )
        self._task = self._bar.add_task("", total=total, completed=done, figures="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the number of commits made, the metrics, and the time left."""
        figures = self._figures(step, metrics)
        self._bar.update(self._task, completed=step, figures=figures)
        if self._bar.disable:
            self.note(f"step {step}/{self.total}  {figures}")

    def note(self, text: str) -> None:
        """Prints a line of text, above the bar if one is shown."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _figures(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [
            shape.format(metrics[name])
            for name, shape in SHOWN.items()
            if name in metrics
        ]
        left = self._seconds_left(step)
        if left is not None:
            hours, seconds = divmod(round(left), 3600)
            parts.append("{}:{:02}:{:02} left".format(hours, *divmod(seconds, 60)))
        return "  ".join(parts)

    def _seconds_left(self, step: int) -> float | None:
        now = self._clock()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            return None
        since_step, since = self._first
        return (now - since) / (step - since_step) * (self.total - step)
