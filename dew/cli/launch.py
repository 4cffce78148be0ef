"""`dew launch`: any command as several processes of one `jax.distributed` run."""

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import tyro

from dew.cli.children import Children
from dew.cli.launched import COORDINATOR, COUNT, INDEX

HOST = "127.0.0.1"


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

    def check(self) -> None:
        """Raises unless there is a command, and a process to run it.

        Raises:
            ValueError: either is missing.
        """
        if self.processes < 1 or not self.command:
            raise ValueError(
                "dew launch needs --processes >= 1 and a command after --, got "
                f"{self.processes} and {' '.join(self.command) or 'no command'}"
            )

    def run(self) -> int:
        """Runs all processes; returns the exit code of the first that failed.

        A signal is forwarded to all of them, and a second one ends them at once. When
        one fails, the others end within 15 seconds, and its error is printed last.
        """
        with _reserved_port() as port:
            children = Children(
                # -P: no file of the working folder stands in for a module.
                [sys.executable, "-P", "-m", "dew", *self.command],
                [self._environment(index, port) for index in range(self.processes)],
            )
            return children.run()

    def _environment(self, index: int, port: int) -> Mapping[str, str]:
        # gRPC would send even local calls through a proxy.
        direct = filter(None, (os.environ.get("no_grpc_proxy"), HOST))
        has_proxy = any(name.lower().endswith("_proxy") for name in os.environ)
        return {
            **os.environ,
            **({"no_grpc_proxy": ",".join(direct)} if has_proxy else {}),
            COORDINATOR: f"{HOST}:{port}",
            COUNT: str(self.processes),
            INDEX: str(index),
            # Nobody outside this machine has business with the coordinator.
            "JAX_COORDINATOR_BIND_ADDRESS": f"{HOST}:{port}",
        }


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Yields a free port that no other program gets before the first process has it.

    The coordinator opens its port with SO_REUSEPORT, and so may open this one.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((HOST, 0))
        yield held.getsockname()[1]
