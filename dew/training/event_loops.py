"""Event loops that end in silence when one of many reads fails.

orbax reads all arrays of a checkpoint at once in an event loop of its own. When one
read fails it closes the loop at once, and every other read that is still under way
prints a traceback of its own. The first error is raised in any case; with these loops
it is the only one shown.
"""

import asyncio
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any


class _ReadingLoop(asyncio.SelectorEventLoop):
    """A loop that waits for its tasks before it closes, and is told nothing after."""

    def close(self) -> None:
        if not self.is_closed() and not self.is_running():
            tasks = asyncio.all_tasks(self)
            if tasks:
                self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()

    def call_soon_threadsafe(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.Handle:
        if self.is_closed():
            return asyncio.Handle(callback, args, self, context)
        return super().call_soon_threadsafe(callback, *args, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Leaves out the errors of other reads: the first one is raised."""


@contextmanager
def one_error_only() -> Iterator[None]:
    """Makes the event loops that are opened in its block end in silence."""
    with warnings.catch_warnings():
        # Python 3.14 deprecates policies, and has no other way to choose loops that
        # another library opens.
        warnings.simplefilter("ignore", DeprecationWarning)
        before = asyncio.get_event_loop_policy()
        asyncio.set_event_loop_policy(_ReadingPolicy())
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            asyncio.set_event_loop_policy(before)


class _ReadingPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _ReadingLoop()
