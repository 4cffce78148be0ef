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
"""Environment variables of a launched process: coordinator, count and index."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Run a command as several processes of one distributed run.

    For example `dew launch --processes 2 -- pretrain …`, on this machine. On several
    hosts, start the command on each of them with DEW_COORDINATOR=HOST:PORT,
    DEW_PROCESSES=N and DEW_PROCESS=I set.
    """

    processes: int
    """Number of processes."""
    command: tyro.conf.Positional[tuple[str, ...]]
    """Command to run and its flags, after a --."""

    def run(self) -> int:
        """Runs all processes, and stops all when one fails; returns its exit code."""
        if self.processes < 1 or not self.command:
            raise ValueError(
                "dew launch needs --processes >= 1 and a command after --, got "
                f"{self.processes} and {' '.join(self.command) or 'no command'}"
            )
        address = f"127.0.0.1:{_free_port()}"
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "dew", *self.command],
                env={
                    **os.environ,
                    COORDINATOR: address,
                    COUNT: str(self.processes),
                    INDEX: str(index),
                },
                # All processes print the same result, so one is forwarded; errors of
                # the others still reach stderr.
                stdout=subprocess.PIPE if index == 0 else subprocess.DEVNULL,
            )
            for index in range(self.processes)
        ]
        forwarder = threading.Thread(target=_forward, args=(processes[0],))
        forwarder.start()
        try:
            code = _wait(processes)
            forwarder.join()
            return code
        finally:
            for process in processes:
                process.kill()


def join_launched() -> None:
    """Connects a process that `dew launch` started to its distributed run."""
    if COORDINATOR not in os.environ:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        os.environ[COORDINATOR],
        num_processes=int(os.environ[COUNT]),
        process_id=int(os.environ[INDEX]),
    )


def _wait(processes: list["subprocess.Popen[bytes]"]) -> int:
    """Returns the first exit code that is not 0, or 0 once all have ended."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(0.1)


def _forward(process: "subprocess.Popen[bytes]") -> None:
    """Copies a process's stdout to this one's, without the lines that gloo prints."""
    for line in process.stdout or ():
        if not line.startswith(b"[Gloo]"):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
