"""The commits at which a run logs, evaluates, saves and profiles."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """The commits at which a run logs, evaluates and saves; the last does all three.

    `log`, `evaluate` and `save` are periods in commits, None for never. The `first`
    commit after a start is logged by itself, for it includes the compilation. `profile`
    is the folder for a profile of the second.
    """

    first: int
    last: int
    log: int
    evaluate: int | None
    save: int | None
    profile: str | Path | None = None

    def next(self, commit: int) -> int:
        """Returns the first commit after `commit` at which anything is due."""
        periods = [p for p in (self.log, self.evaluate, self.save) if p]
        due = [self.last, *(commit - commit % p + p for p in periods)]
        if commit < self.first:
            return min([*due, self.first])
        return commit + 1 if self._is_profiled(commit) else min(due)

    def profiler(self, commit: int) -> AbstractContextManager[None]:
        """Returns jax's profiler for the commit after `commit`, or an empty context."""
        if self.profile is None or not self._is_profiled(commit):
            return nullcontext()
        return jax.profiler.trace(str(self.profile))

    def _is_profiled(self, commit: int) -> bool:
        return self.profile is not None and commit == self.first

    def is_due(self, period: int | None, commit: int) -> bool:
        """Whether something with this period is due at `commit`."""
        return period is not None and (commit % period == 0 or commit == self.last)

    def is_log_due(self, commit: int) -> bool:
        """Whether the commits since the last log are summed up at `commit`."""
        return commit == self.first or self.is_due(self.log, commit)
