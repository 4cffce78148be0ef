"""Programs that run as several real processes of one run, on loopback."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended: its code, after how long, and what it wrote."""

    code: int
    seconds: float
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return (self.err.strip().splitlines() or [""])[-1]


class Processes:
    """Running processes of one program, `python -m MODULE ADDRESS COUNT INDEX …`."""

    def __init__(
        self, module: str, *arguments: str, folder: Path, count: int = 2
    ) -> None:
        address = f"127.0.0.1:{_free_port()}"
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        self.processes = []
        for index in range(count):
            place = [address, str(count), str(index)]
            with (
                (folder / f"out{index}").open("wb") as out,
                (folder / f"err{index}").open("wb") as err,
            ):
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, *place, *arguments],
                        cwd=ROOT,
                        stdout=out,
                        stderr=err,
                        env={
                            **os.environ,
                            "XLA_FLAGS": _flags(),
                            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                        },
                    )
                )

    def send(self, index: int, number: signal.Signals) -> None:
        self.processes[index].send_signal(number)

    def wait(self, timeout_s: float = 120) -> list[Ended]:
        """Waits for all to end, and kills what has not by then."""
        deadline = time.monotonic() + timeout_s
        seconds: dict[int, float] = {}
        while len(seconds) < len(self.processes) and time.monotonic() < deadline:
            for index, process in enumerate(self.processes):
                if index not in seconds and process.poll() is not None:
                    seconds[index] = time.monotonic() - self.started
            time.sleep(0.02)
        for process in self.processes:
            process.kill()
            process.wait()
        # Native stderr passes through a reader, which ends a moment after its process.
        time.sleep(0.2)
        return [
            Ended(
                code=process.returncode,
                seconds=seconds.get(index, timeout_s),
                out=(self.folder / f"out{index}").read_text(),
                err=(self.folder / f"err{index}").read_text(),
            )
            for index, process in enumerate(self.processes)
        ]


def run_processes(
    module: str,
    *arguments: str,
    folder: Path,
    count: int = 2,
    timeout_s: float = 120,
) -> Sequence[Ended]:
    """Starts a program as `count` processes and waits for their ends."""
    running = Processes(module, *arguments, folder=folder, count=count)
    return running.wait(timeout_s)


def _flags() -> str:
    """The tests' own flags for fast compilation, with one device a process."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(f for f in flags if "device_count" not in f)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
