"""What a launched process writes to stderr: lines for people, its error, and noise."""

import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import BinaryIO

ERROR = "dew: error: "
"""Start of the line in which a command says what is wrong."""

NOISE = re.compile(
    r"""
    \[Gloo\]
    | [IWEF]\d{4}\ \d\d:\d\d:\d\d\.\d+\s+\d+\ \S+\.(cc|h|cpp):\d+\]   # absl, glog
    | \d{4}-\d\d-\d\d\ \d\d:\d\d:\d\d\.\d+:\ [IWEF]\ \S+\.(cc|h):\d+\]  # tsl
    | WARNING:\ All\ log\ messages\ before\ absl::InitializeLog
    | \*\*\*\ Check\ failure\ stack\ trace
    | \s*@\s+0x[0-9a-f]+
    | \s*\#\d+\ 0x[0-9a-f]+
    | \s*Additional\ GRPC\ error\ information
    | :?\{"?created"?:|:UNKNOWN:Error\ received\ from\ peer
    | (ERROR|WARNING):absl:
    | WARNING:jax.*JAX\ detected\ proxy\ variable   # `dew launch` goes around it
    | Exception\ ignored\ (in|while|on)\b
    | (During\ handling\ of\ the\ above\ exception|The\ above\ exception\ was)
    """,
    re.VERBOSE,
)
"""Lines of the C++ below jax, which tell a user nothing that the last line does not."""

TRACEBACK = "Traceback (most recent call last):"

RAISED = re.compile(r"[A-Za-z_][\w.]*(: |$)")
"""The line under a traceback: the exception's type, and what it says."""


@dataclass
class ChildOutput:
    """Sorts the lines of one process; `error` is the last thing it complained of.

    Errors are held back, because the launcher prints the first one last. `raised` is
    the exception under the first traceback.
    """

    error: str | None = None
    raised: str | None = None
    _in_traceback: bool = field(default=False, init=False)

    def shown(self, line: str) -> bool:
        """Takes a line in, and returns whether it is forwarded."""
        if line.startswith(TRACEBACK):
            self._in_traceback = True
            return False
        if self._in_traceback:
            if not line.strip() or line[0].isspace():
                return False
            self._in_traceback = False
            if RAISED.match(line):
                self.raised = self.raised or line.strip()
                return False
        if line.startswith(ERROR):
            self.error = line.removeprefix(ERROR).strip()
            return False
        return bool(line.strip()) and not NOISE.match(line)


class Console:
    """One stream that several processes write whole lines to.

    A line that several processes print appears once: the k-th copy of a line is written
    for whoever comes first with it.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._written: Counter[int] = Counter()
        self._seen: dict[int, Counter[int]] = {}

    def write(self, index: int, line: bytes) -> None:
        """Writes a line of a process, with its end, unless another's copy was."""
        key = hash(line)
        with self._lock:
            seen = self._seen.setdefault(index, Counter())
            seen[key] += 1
            if seen[key] > self._written[key]:
                self._written[key] += 1
                self._write(line)

    def write_always(self, line: bytes) -> None:
        """Writes a line, whoever printed it before."""
        with self._lock:
            self._write(line)

    def _write(self, line: bytes) -> None:
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError):
            # The terminal or the pipe is gone; what the processes write is still read,
            # or they would block in the middle of a step.
            pass
