"""A process of a distributed run: how it joins the others, and whom it ends with."""

import atexit
import os
import signal
import threading
import time

from dew.processes import connect_processes

COORDINATOR, COUNT, INDEX = "DEW_COORDINATOR", "DEW_PROCESSES", "DEW_PROCESS"
"""Environment variables of a process: coordinator, count and index."""

LAUNCHER = "DEW_LAUNCHER"
"""Set by `dew launch`, whose process is at the other end of stdin."""

SAVE_S = 10.0
"""Seconds a process has to save and end once its launcher is gone."""


def is_one_of_several() -> bool:
    """Whether this process is to join others, by its environment."""
    return COORDINATOR in os.environ and _place()[0] > 1


def join_launched() -> None:
    """Connects a process to its distributed run, if it is one of several.

    Raises:
        ValueError: the variables that say which of several it is are not complete, or
            out of range.
    """
    # What this process starts has another stdin.
    if os.environ.pop(LAUNCHER, None):
        threading.Thread(target=_end_with_launcher, daemon=True).start()
    if not is_one_of_several():
        return
    count, index = _place()
    connect_processes(os.environ[COORDINATOR], count=count, index=index)


def _place() -> tuple[int, int]:
    """Returns the number of processes and which of them this is, from 0."""
    given = {name: os.environ.get(name, "") for name in (COUNT, INDEX)}
    wrong = [
        f"{name} must be a number, got {value or 'nothing'}"
        for name, value in given.items()
        if not value.isdecimal()
    ]
    if ":" not in os.environ[COORDINATOR]:
        wrong.append(f"{COORDINATOR} must be HOST:PORT, got {os.environ[COORDINATOR]}")
    if not wrong and not int(given[INDEX]) < int(given[COUNT]):
        wrong.append(
            f"{INDEX} counts from 0 to {COUNT} - 1, got {given[INDEX]} of "
            f"{given[COUNT]}"
        )
    if wrong:
        raise ValueError("; ".join(wrong))
    return int(given[COUNT]), int(given[INDEX])


def _end_with_launcher() -> None:
    """Ends this process, and all it has started, after its launcher has ended.

    The pipe ends whatever ended the launcher, SIGKILL included. A thread sees it, as
    the main one may be waiting in native code for another process.
    """
    while os.read(0, 1024):
        pass
    # What is printed from now on has no reader, and must not raise.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        # Training saves; what it has started ends with it.
        atexit.register(_end_group)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SAVE_S)
    _end_group()


def _end_group() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)
