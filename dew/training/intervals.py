"""At which commits something is due."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """At which commits something is due; at the last one everything is.

    The `first` commit after a start is logged by itself: it holds the compilation.
    """

    first: int
    last: int
    log: int
    evaluate: int | None
    save: int | None
    profiled: str | Path | None = None

    def next(self, commit: int) -> int:
        """The first commit after this one at which anything is due."""
        periods = [p for p in (self.log, self.evaluate, self.save) if p]
        due = [self.last, *(commit - commit % p + p for p in periods)]
        if commit < self.first:
            return min([*due, self.first])
        return commit + 1 if self._is_watched(commit) else min(due)

    def watching(self, commit: int) -> AbstractContextManager[None]:
        """The profiler around the commit after `commit`, if that is the one."""
        if self.profiled is None or not self._is_watched(commit):
            return nullcontext()
        return jax.profiler.trace(str(self.profiled))

    def _is_watched(self, commit: int) -> bool:
        return self.profiled is not None and commit == self.first

    def is_due(self, period: int | None, commit: int) -> bool:
        """Whether a thing of this period is due now."""
        return period is not None and (commit % period == 0 or commit == self.last)

    def is_log_due(self, commit: int) -> bool:
        """Whether the commits since the last log are to be summed up now."""
        return commit == self.first or self.is_due(self.log, commit)
