"""SIGTERM and Ctrl-C: one process gets it, and all stop at the same place."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dew.processes import exchange_messages

STOPPING = (signal.SIGTERM, signal.SIGINT)
"""Signals that stop a run."""


class Stopped(Exception):
    """The end of a run that a signal asked for, in this or another process."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """The first stopping signal that this process got, and phases that heed it."""

    def __init__(self) -> None:
        self.number: int | None = None

    @property
    def message(self) -> str:
        """What this process says to the others: the signal's number, or nothing."""
        return "" if self.number is None else str(int(self.number))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Runs its block, then stops all processes if one failed or got a signal.

        Raises:
            Exception: the block's own exception.
            ProcessError: the block failed in another process.
            Stopped: a process got a signal.
        """
        fault: Exception | None = None
        try:
            yield
        except Exception as raised:
            fault = raised
        raise_stop(exchange_messages(name, self.message, fault))


def raise_stop(messages: list[str]) -> None:
    """Raises `Stopped` with the first signal among the messages of all processes."""
    for message in messages:
        if message.isdecimal():
            raise Stopped(int(message))


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Notes SIGTERM and SIGINT in its block, in place of the process's own handlers.

    A second SIGINT ends the process at once, with status 130. Only the main thread can
    handle signals; in another nothing is noted.
    """
    signals = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def note(number: int, _: object) -> None:
        if signals.number is None:
            signals.number = number

    before = {number: signal.signal(number, note) for number in STOPPING}
    # Python runs a handler between two of its own instructions, but a compilation or a
    # collective takes long; the byte in this socket is there at once.
    read, write = socket.socketpair()
    write.setblocking(False)
    previous = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_at_second_interrupt, args=(read,), daemon=True).start()
    try:
        yield signals
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        write.close()


def _end_at_second_interrupt(read: socket.socket) -> None:
    interrupts = 0
    with read:
        while number := read.recv(1):
            interrupts += number[0] == signal.SIGINT
            if interrupts == 2:
                os._exit(128 + signal.SIGINT)
