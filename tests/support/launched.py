"""Commands as several processes, by `dew launch` and by signals from outside."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# Two processes of one device each, compiled as quickly as the tests' own.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a launched command ended, and what it had printed."""

    code: int
    seconds: float
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line on stderr, empty where there is none."""
        return (self.err.strip().splitlines() or [""])[-1]


class Started:
    """A running command, whose output goes to files."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path = ROOT,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = folder / "stdout", folder / "stderr"
        self.asked_at = time.monotonic()
        with (
            self._files[0].open("wb") as out,
            self._files[1].open("wb") as err,
            _heeding_signals(),
        ):
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env={
                    **os.environ,
                    "XLA_FLAGS": FLAGS,
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                    **environment,
                },
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
            )

    def until(self, ready: Callable[[], bool], timeout_s: float = 180) -> None:
        """Waits until something is true of the running command."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert self.process.poll() is None, f"ended early: {self.text()}"
            assert time.monotonic() < deadline, f"not in time: {self.text()}"
            time.sleep(0.05)

    def shows(self, text: str) -> bool:
        """Whether stderr has a text by now."""
        return text in self.text()

    def text(self) -> str:
        """What stderr has by now."""
        return self._files[1].read_text()

    def end(self, timeout_s: float = 120) -> Ended:
        """Waits for the end; seconds count from the last signal, or from the start."""
        try:
            code = self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # The second signal ends a launcher and all it started at once.
            for _ in range(2):
                self.process.send_signal(signal.SIGTERM)
                time.sleep(1)
            self.process.wait(timeout=30)
            raise
        return Ended(
            code=code if code >= 0 else 128 - code,
            seconds=time.monotonic() - self.asked_at,
            out=self._files[0].read_text(),
            err=self.text(),
        )


class Launched(Started):
    """A running `dew launch`."""

    def __init__(
        self, folder: Path, *command: Any, processes: int = 2, cwd: Path = ROOT
    ) -> None:
        launch = ["launch", "--processes", str(processes), "--", *map(str, command)]
        super().__init__(folder, [sys.executable, "-P", "-m", "dew", *launch], {}, cwd)

    def ranks(self) -> dict[int, int]:
        """Returns the process ids of the launched processes by their index."""
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        return {_index(int(pid)): int(pid) for pid in found.stdout.split()}

    def send(self, number: int, *, rank: int | None = None) -> None:
        """Sends a signal to the launcher, or to one of its processes."""
        self.asked_at = time.monotonic()
        os.kill(self.process.pid if rank is None else self.ranks()[rank], number)


def launched(folder: Path, *command: Any, cwd: Path = ROOT) -> Ended:
    """Runs a command as two processes to its end."""
    return Launched(folder, *command, cwd=cwd).end()


def on_hosts(folder: Path, *commands: Sequence[str]) -> list[Ended]:
    """Runs one command a process, without a launcher, as on several hosts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {
        "DEW_COORDINATOR": f"127.0.0.1:{port}",
        "DEW_PROCESSES": str(len(commands)),
    }
    hosts = [
        Started(
            folder / str(index),
            [sys.executable, "-m", "dew", *command],
            {**place, "DEW_PROCESS": str(index)},
        )
        for index, command in enumerate(commands)
    ]
    return [host.end() for host in hosts]


def trial(kind: str, ended: Ended, seconds: float | None = None) -> None:
    """Adds a line to the list of trials, in the file that DEW_TRIALS names."""
    file = os.environ.get("DEW_TRIALS")
    if file:
        took = ended.seconds if seconds is None else seconds
        line = f"| {kind} | {took:.1f} | {ended.code} | {ended.last} |\n"
        with Path(file).open("a") as table:
            table.write(line)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be noticed does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def all_gone(pids: dict[int, int], within_s: float) -> float:
    """Waits until processes are gone; returns after how many seconds they were."""
    began = time.monotonic()
    while any(map(is_alive, pids.values())):
        assert time.monotonic() - began < within_s, f"{pids} are alive"
        time.sleep(0.05)
    return time.monotonic() - began


@contextmanager
def _heeding_signals() -> Iterator[None]:
    """Undoes what nohup and a shell's & do: what is ignored here, a child ignores."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    ignored = [n for n in numbers if signal.getsignal(n) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def _index(pid: int) -> int:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return -1
    for entry in raw.split(b"\0"):
        if entry.startswith(b"DEW_PROCESS="):
            return int(entry.partition(b"=")[2])
    return -1
