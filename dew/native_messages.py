"""A filter of native stderr: one line in place of the distributed runtime's stack.

Runs as a program of its own, so that it outlives the abort it reports. It passes lines
on, apart from what jax's coordination service logs when a process is gone. It ends when
the process whose stderr it reads does.
"""

import re
import sys
from typing import BinaryIO

HEAD = re.compile(rb"([IWEF])\d{4} [\d:.]+ +\d+ ([\w.]+):\d+\] ")
"""Severity and source file at the start of a native log message."""

RUNTIME = re.compile(
    rb"(coordination_\w+|preemption_sync_manager|client|distributed\w*|service)\.(cc|h)"
)
"""Files of the distributed runtime; their errors follow from a process's end."""

FATAL = re.compile(rb"\*\*\*|RPC:|Additional GRPC")
"""What follows the fatal message: its text is complete."""


def pass_on(lines: BinaryIO, out: BinaryIO) -> None:
    """Copies lines but the runtime's; the fatal one becomes a line that names who."""
    hidden = False
    fatal: bytes | None = None
    for line in lines:
        head = HEAD.match(line)
        if head:
            hidden = bool(RUNTIME.fullmatch(head[2]))
        # A message may have several lines, and a stack after it.
        hidden = hidden and not line.startswith(b"Traceback")
        if not hidden:
            out.write(line)
        elif head and head[1] == b"F":
            fatal = line
        elif fatal and FATAL.match(line):
            out.write(_summary(fatal))
            fatal = None
        elif fatal:
            fatal += line
        out.flush()
    if fatal:
        out.write(_summary(fatal))


def _summary(text: bytes) -> bytes:
    named = re.search(rb"stopped sending heartbeats\):\s*([\d\s,]+)", text)
    who = b", ".join(named[1].split()) if named else b"0"
    return (
        b"dew: error: process " + who + b" no longer answers: it was killed, or its "
        b"machine is out of reach\n"
    )


if __name__ == "__main__":
    pass_on(sys.stdin.buffer, sys.stdout.buffer)
