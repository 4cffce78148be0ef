"""Several processes that start, stop and end together."""

import io
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from dew.cli.child_output import ERROR, ChildOutput, Console
from dew.cli.launched import LAUNCHER

OWN_END_S = 8.0
"""Seconds the others have, once one has failed, to end by what they agreed on."""

TERMINATED_S = 4.0
"""Seconds they have then, from SIGTERM to SIGKILL."""

HANGUP: int = getattr(signal, "SIGHUP", signal.SIGTERM)
"""The end of a terminal, where the system has such a signal."""

SIGNALS = frozenset((signal.SIGINT, signal.SIGTERM, HANGUP))
"""Signals that are forwarded, the end of a terminal as SIGTERM, which saves."""

STOPPED = frozenset(128 + number for number in SIGNALS)
"""Exit codes of a process that stopped because it was asked to."""


@dataclass(eq=False)
class Child:
    """One process, the lines it writes, and how it ended."""

    index: int
    process: "subprocess.Popen[bytes]"
    output: ChildOutput = field(default_factory=ChildOutput)
    code: int | None = None
    """Exit code as a shell has it: 128 + n for a process that signal n ended."""

    def fault(self) -> str | None:
        """Returns what went wrong in one line; None where it was asked to stop."""
        ended_by = self.process.returncode
        if ended_by is None or ended_by == 0 or ended_by in STOPPED:
            return None
        if self.output.error is not None:
            return self.output.error
        if ended_by < 0:
            name = signal.Signals(-ended_by).name
            return f"process {self.index} was ended by {name}"
        if self.output.raised is not None:
            return f"{self.output.raised} (DEW_TRACEBACK=1 prints where)"
        return f"process {self.index} ended with exit code {ended_by}"

    def send(self, number: int) -> None:
        """Sends a signal to the process alone, which tells its own helpers."""
        if self.code is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Ends what is left, and the pipe that tells the process of this one's end."""
        self.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def kill(self) -> None:
        """Ends the process and everything it has started, at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


class Children:
    """Processes of one command, each in a session of its own.

    In its own session a process does not get a terminal's Ctrl-C beside the forwarded
    one: the second would end it at once, in the middle of its save. Its stdin is a pipe
    that ends with this process, whatever ends that; see `dew.cli.launched`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        own_end_s: float = OWN_END_S,
        terminated_s: float = TERMINATED_S,
    ) -> None:
        self._stages = (
            (own_end_s, signal.SIGTERM),
            (terminated_s, signal.SIGKILL),
        )
        self._ended: queue.Queue[Child] = queue.Queue()
        self._stderr = Console(sys.stderr.buffer)
        self._stdout = Console(sys.stdout.buffer)
        self._signals: list[int] = []
        self._forwarders: list[threading.Thread] = []
        self._children: list[Child] = []
        self._command, self._environments = command, environments

    def run(self) -> int:
        """Runs all processes to their end; returns the first exit code that is not 0.

        The error of the first that failed is the last line on stderr.
        """
        with self._forwarding_signals():
            try:
                for index, environment in enumerate(self._environments):
                    self._start(index, environment)
                failed = self._wait()
            finally:
                for child in self._children:
                    child.end()
            for forwarder in self._forwarders:
                # Something that left its group may hold a pipe open.
                forwarder.join(timeout=2)
        if failed is None:
            return 0
        if len(self._signals) > 1:
            return 128 + self._signals[0]
        if not (self._signals and failed.code in STOPPED):
            self._report(failed)
        return failed.code or 0

    def _start(self, index: int, environment: Mapping[str, str]) -> None:
        if self._signals:
            return
        process = subprocess.Popen(
            list(self._command),
            env={**environment, LAUNCHER: str(os.getpid())},
            stdin=subprocess.PIPE,
            # All processes print the same result, so one is forwarded.
            stdout=subprocess.PIPE if index == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        child = Child(index, process)
        self._children.append(child)
        self._thread(self._await, child)
        self._forwarders += [self._thread(self._forward_stderr, child)]
        if index == 0:
            self._forwarders += [self._thread(self._forward_stdout, child)]

    def _thread(self, work: Callable[[Child], None], child: Child) -> threading.Thread:
        thread = threading.Thread(target=work, args=(child,), daemon=True)
        thread.start()
        return thread

    def _await(self, child: Child) -> None:
        child.process.wait()
        self._ended.put(child)

    def _wait(self) -> Child | None:
        """Waits until all have ended; returns the first that failed, if any did."""
        failed: Child | None = None
        failed_at = 0.0
        stages = iter(self._stages)
        stage: tuple[float, int] | None = None
        while any(child.code is None for child in self._children):
            try:
                ended = self._ended.get(timeout=0.2)
            except queue.Empty:
                pass
            else:
                code = ended.process.returncode
                ended.code = code if code >= 0 else 128 - code
                if ended.code and failed is None:
                    failed, failed_at, stage = ended, time.monotonic(), next(stages)
            if stage is not None and time.monotonic() - failed_at > stage[0]:
                self._send(stage[1])
                failed_at, stage = time.monotonic(), next(stages, None)
        return failed

    def _send(self, number: int) -> None:
        for child in self._children:
            if number == signal.SIGKILL:
                child.kill()
            else:
                child.send(number)

    @contextmanager
    def _forwarding_signals(self) -> Iterator[None]:
        """Forwards the first signal, and ends everything at the second."""

        def forward(number: int, _: FrameType | None) -> None:
            self._signals.append(number)
            is_first = len(self._signals) == 1
            asked = signal.SIGTERM if number == HANGUP else number
            self._send(asked if is_first else signal.SIGKILL)

        # A signal that is ignored here, as nohup does, stays ignored.
        heeded = [n for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, forward) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward_stdout(self, child: Child) -> None:
        with child.process.stdout or io.BytesIO() as lines:
            for line in lines:
                if not line.startswith(b"[Gloo]"):
                    self._stdout.write_always(line)

    def _forward_stderr(self, child: Child) -> None:
        is_whole = bool(os.environ.get("DEW_TRACEBACK"))
        with child.process.stderr or io.BytesIO() as lines:
            for line in lines:
                is_shown = child.output.shown(line.decode(errors="replace"))
                if is_whole:
                    self._stderr.write_always(b"[%d] %s" % (child.index, line))
                elif is_shown:
                    self._stderr.write(child.index, line)

    def _report(self, failed: Child) -> None:
        """Prints what else went wrong, and then the first cause."""
        cause = failed.fault()
        if cause is None:
            return
        said = {c.index: c.output.error for c in self._children if c.output.error}
        # Others repeat it with the name of the process that it comes from.
        same = {i: text for i, text in said.items() if text in cause or cause in text}
        for other in dict.fromkeys(said[i] for i in said if i not in same):
            self._stderr.write_always(f"{ERROR}{other}\n".encode())
        origin = min(same, key=lambda i: len(same[i]), default=failed.index)
        cause = same.get(origin, cause)
        is_everywhere = list(said.values()) == [cause] * len(self._children)
        if origin > 0 and not is_everywhere and not cause.startswith("process "):
            cause = f"process {origin}: {cause}"
        self._stderr.write_always(f"{ERROR}{cause}\n".encode())
