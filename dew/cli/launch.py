"""`dew launch`: any command as several processes of one `jax.distributed` run."""

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import jax
import tyro

COORDINATOR, COUNT, INDEX = "DEW_COORDINATOR", "DEW_PROCESSES", "DEW_PROCESS"
"""How a launched process learns its place."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Run a command as several processes.

    As in `dew launch --processes 2 -- pretrain …`, on this machine. Elsewhere, start
    the command yourself on each host, with DEW_COORDINATOR=HOST:PORT, DEW_PROCESSES=N
    and DEW_PROCESS=I set.
    """

    processes: int
    """How many."""
    command: tyro.conf.Positional[tuple[str, ...]]
    """The command and its flags, after a --."""

    def run(self) -> int:
        """Starts all, and ends all as soon as one fails; returns the worst code."""
        if self.processes < 1 or not self.command:
            raise ValueError(
                "dew launch needs --processes >= 1 and a command after --, got "
                f"{self.processes} and {' '.join(self.command) or 'none'}"
            )
        address = f"127.0.0.1:{_free_port()}"
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "dew", *self.command],
                env={
                    **os.environ,
                    COORDINATOR: address,
                    COUNT: str(self.processes),
                    INDEX: str(index),
                },
                # One process speaks for all; what the others have to complain of is
                # still heard.
                stdout=subprocess.PIPE if index == 0 else subprocess.DEVNULL,
            )
            for index in range(self.processes)
        ]
        speaker = threading.Thread(target=_forward, args=(started[0],))
        speaker.start()
        try:
            code = _wait(started)
            speaker.join()
            return code
        finally:
            for process in started:
                process.kill()


def join_launched() -> None:
    """Joins the run that this process was launched for, if it was."""
    if COORDINATOR not in os.environ:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        os.environ[COORDINATOR],
        num_processes=int(os.environ[COUNT]),
        process_id=int(os.environ[INDEX]),
    )


def _wait(processes: list["subprocess.Popen[bytes]"]) -> int:
    """The first code that is not 0, or 0 once all have ended."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(0.1)


def _forward(process: "subprocess.Popen[bytes]") -> None:
    """Passes on what a process prints, but for gloo's greetings among the JSON."""
    for line in process.stdout or ():
        if not line.startswith(b"[Gloo]"):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
