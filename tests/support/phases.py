"""A program of several processes in which phases fail, one after the other.

Writes on stdout, as one line of JSON each, what every case gave in this process.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable

from dew.processes import (
    ProcessError,
    agree_process_phase,
    connect_processes,
    exchange_messages,
    post_fault,
    process_phase,
)


def fails(index: int, *ranks: int) -> None:
    with process_phase("preview"):
        if index in ranks:
            raise KeyError(f"no tree\nin process {index}")


def waits(index: int) -> None:
    """Process 1 comes late, with all that process 0 waits for."""
    time.sleep(index)
    agree_process_phase("late")


def differs(index: int) -> None:
    agree_process_phase("save" if index else "preview")


def leaves(index: int) -> None:
    """Process 1 fails between two phases, and process 0 comes to the next."""
    if index == 1:
        post_fault(OSError("the disk is gone"))
        raise OSError("the disk is gone")
    agree_process_phase("save")


def killed(index: int, rank: int) -> None:
    agree_process_phase("start")
    if index == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    agree_process_phase("step")


CASES: dict[str, Callable[[int], object]] = {
    "goes on": lambda index: agree_process_phase("step"),
    "messages": lambda index: exchange_messages("step", "stop" if index else ""),
    "no messages": lambda index: exchange_messages("step", ""),
    "process 0 fails": lambda index: fails(index, 0),
    "process 1 fails": lambda index: fails(index, 1),
    "both fail": lambda index: fails(index, 0, 1),
    "late": waits,
    "still agrees": lambda index: agree_process_phase("step"),
    "differs": differs,
    "leaves": leaves,
    "process 0 killed": lambda index: killed(index, 0),
    "process 1 killed": lambda index: killed(index, 1),
}


def main(address: str, count: str, index: str, *cases: str) -> None:
    connect_processes(address, count=int(count), index=int(index))
    for case in cases:
        try:
            outcome = CASES[case](int(index))
        except (KeyError, OSError, ProcessError) as fault:
            outcome = f"{type(fault).__name__}: {fault}"
        print(json.dumps({case: outcome}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
