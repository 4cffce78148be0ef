"""Agreement among the processes of one run, over jax's distributed runtime.

A process that fails before a collective leaves the others waiting in it for good.
So before each collective phase every process reports whether it continues, and reads
the reports of the others: one barrier and one read of the runtime's key-value store, on
the host, about a millisecond. With one process nothing is exchanged.
"""

import atexit
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax._src import distributed

Waited = TypeVar("Waited")

HEARTBEAT_S = 30
"""Seconds without a heartbeat after which a process counts as dead."""

FAULT_TIMEOUT_S = 10
"""Seconds that a process with a fault waits for the others to read its report.

They may be inside a collective that waits for this process, which ends when it does.
"""

ABORT_S = 5
"""Seconds that the runtime gets to abort the process once it says that one is dead."""

EXIT_TIMEOUT_S = 3
"""Seconds that a process which ends by a fault waits for the others to end."""

POLL_S = 0.5
"""Seconds between two reads of the other processes' reports, while one waits."""

FOREVER_MS = 7 * 24 * 3600 * 1000
"""Others may compile or load for long; the heartbeats say whether they live."""

REPORTED = "fault reported"
"""Barrier after which every process has read the report of a fault."""

AGREED = "agreed by all processes"
"""Attribute of an exception that all processes have agreed on."""

ROOT = "dew"
"""Prefix of our barriers and keys in the runtime's store."""


class ProcessError(RuntimeError):
    """The fault of another process; `process` is its index, None where unknown."""

    def __init__(self, message: str, process: int | None = None) -> None:
        super().__init__(message)
        self.process = process
        vars(self)[AGREED] = True


def connect_processes(
    coordinator: str | None = None,
    *,
    count: int | None = None,
    index: int | None = None,
) -> None:
    """Connects this process to the others of a run, before any use of a device.

    Does what `jax.distributed.initialize` does, which finds on most clusters what is
    None here. In addition a dead process is noticed after `HEARTBEAT_S` seconds, in
    place of 100, and one line names it in place of the runtime's C++ stack: a small
    process of its own, which ends with this one, reads this one's native stderr.

    Args:
        coordinator: address of process 0, as HOST:PORT.
        count: number of processes.
        index: this process's index, from 0.
    """
    # Between CPUs, jax has no other implementation that needs no installation.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _filter_native_messages()
    with _default_interrupt():
        jax.distributed.initialize(
            coordinator,
            num_processes=count,
            process_id=index,
            heartbeat_timeout_seconds=HEARTBEAT_S,
        )


@contextmanager
def _default_interrupt() -> Iterator[None]:
    """Lets Ctrl-C end the process in its block, which waits in native code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def agree_process_phase(phase: str, fault: BaseException | None = None) -> None:
    """Waits for all processes to reach `phase`, and raises on all if one has a fault.

    Every process calls it with the same phase, before its next collective; `fault` is
    the exception of this process since the last phase. The name of a phase contains no
    step or other count.

    >>> agree_process_phase("preview")

    Raises:
        BaseException: `fault` itself, in the process that has it.
        ProcessError: another process has one; the message names it, the phase and the
            first fault.
    """
    exchange_messages(phase, "", fault)


@contextmanager
def process_phase(phase: str) -> Iterator[None]:
    """Runs its block, then agrees with all other processes on how it went.

    The block itself communicates with no other process.

    >>> with process_phase("preview"):
    ...     text = "what may fail on one process alone"

    Raises:
        BaseException: the block's own exception.
        ProcessError: the block failed in another process.
    """
    fault: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        fault = raised
    agree_process_phase(phase, fault)


def exchange_messages(
    phase: str, message: str, fault: BaseException | None = None
) -> list[str]:
    """Agrees as `agree_process_phase` does, and returns the message of each process.

    An empty message costs no write to the store.

    Raises:
        BaseException: `fault` itself, in the process that has it.
        ProcessError: another process has a fault, or no longer answers.
    """
    coordinator = _Coordinator.current()
    if coordinator is None:
        if fault is not None:
            raise fault
        return [message]
    return coordinator.exchange(phase, message, fault)


@contextmanager
def process_run(name: str) -> Iterator[None]:
    """Runs its block, and reports to the others an exception that ends it here.

    For the whole of a run, with phases and collectives inside: an exception that the
    processes agreed on already passes as it is. Others that wait at a phase, or through
    `wait_with_processes`, raise as well.

    Raises:
        Exception: the block's own exception.
        ProcessError: a collective of the block broke, as another process failed or
            died.
    """
    try:
        yield
    except Exception as raised:
        fault = name_lost_process(raised)
        if AGREED not in vars(fault):
            agree_process_phase(name, fault)
        if fault is raised:
            raise
        raise fault from raised


def wait_with_processes(call: Callable[[], Waited]) -> Waited:
    """Runs a call that waits for other processes, and raises if one of them fails.

    The call runs in a thread, and is left alone where a process fails: it would never
    return.

    Raises:
        ProcessError: another process failed, or no longer answers.
    """
    coordinator = _Coordinator.current()
    return call() if coordinator is None else coordinator.wait_for(call)


def post_fault(fault: BaseException) -> None:
    """Reports to the others a fault outside every phase, before this process ends.

    A process that waits for this one at a phase raises a `ProcessError` that names the
    fault. At its exit this process does not wait for the others, as jax would.
    """
    coordinator = _Coordinator.current()
    if coordinator is not None:
        coordinator.leave(fault, is_own=not isinstance(fault, ProcessError))


def leave_processes() -> None:
    """Waits a moment until all can end, where a run ends by a fault.

    The store ends with process 0, and others may be about to look into it. For use
    before `os._exit`; at a normal exit jax waits for all processes, however long.
    """
    coordinator = _Coordinator.current()
    if coordinator is not None:
        coordinator.wait_for_exit()


def name_lost_process(fault: BaseException) -> BaseException:
    """Returns what made a collective fail: another process's fault, or its death.

    An exception that does not come from a broken connection is returned as it is.
    """
    coordinator = _Coordinator.current()
    # jax raises a RuntimeError of its own from a step, and a ValueError at a dispatch.
    is_broken = isinstance(fault, RuntimeError | ValueError) and _CONNECTION.search(
        str(fault)
    )
    if coordinator is None or isinstance(fault, ProcessError) or not is_broken:
        return fault
    return coordinator.diagnose()


class _Coordinator:
    """The phases of this process so far, and the key-value store of all processes."""

    _instance: "_Coordinator | None" = None

    def __init__(self, client: Any, index: int, count: int) -> None:
        self.client, self.index, self.count = client, index, count
        self._phases = 0
        self._written = ""
        self._left = False

    @classmethod
    def current(cls) -> "_Coordinator | None":
        """Returns the coordinator of this run; None with one process."""
        state = distributed.global_state
        if state.client is None or state.num_processes == 1:
            return None
        if cls._instance is None or cls._instance.client is not state.client:
            cls._instance = cls(state.client, state.process_id, state.num_processes)
        return cls._instance

    def exchange(
        self, phase: str, message: str, fault: BaseException | None
    ) -> list[str]:
        """Waits for all at a phase, and returns the message of each process."""
        if fault is not None and not isinstance(fault, ProcessError):
            fault = name_lost_process(fault)
        if fault is not None and self._left:
            raise fault
        self._phases += 1
        folder = self._folder(self._phases)
        if message or fault is not None:
            record = {"text": message}
            with self._store(phase):
                if fault is not None:
                    record |= self._record(fault, phase)
                self._set(f"{folder}{self.index}", record)
        if fault is not None:
            self._wait_with_fault(phase, fault)
            vars(fault)[AGREED] = True
            raise fault
        self._wait(phase)
        with self._store(phase):
            records = self._records(folder)
        if any("type" in record for record in records):
            # The process with the fault may end now, and with process 0 the store.
            self._wait(REPORTED, timeout_s=FAULT_TIMEOUT_S)
        # All have read the last phase's messages once they have come to this one.
        if self._written and self.index == 0:
            with self._store(phase):
                self.client.key_value_delete(self._written)
        self._written = folder if records else ""
        _raise_first(records)
        texts = {record["process"]: record["text"] for record in records}
        return [texts.get(i, "") for i in range(self.count)]

    @contextmanager
    def _store(self, phase: str) -> Iterator[None]:
        """Names process 0, which has the store, where a block cannot reach it."""
        try:
            yield
        except jax.errors.JaxRuntimeError as gone:
            # The runtime is about to abort this process, with a line of ours.
            time.sleep(ABORT_S)
            raise self._lost([0], phase) from gone

    def wait_for(self, call: Callable[[], Waited]) -> Waited:
        """Runs a call in a thread, and reads the reports of others until it returns."""
        ended = _in_thread(call)
        while True:
            try:
                result, fault = ended.get(timeout=POLL_S)
            except queue.Empty:
                # A process that gave up this phase reports its fault under the next.
                self._read_faults(self._phases + 1)
                continue
            if fault is not None:
                raise fault
            return result

    def leave(self, fault: BaseException, *, is_own: bool = True) -> None:
        """Reports a fault outside the phases, and stops waiting for the others."""
        if self._left:
            return
        self._left = True
        atexit.register(self._disconnect)
        if not is_own:
            return
        try:
            self._set(f"{ROOT}/faults/{self.index}", self._record(fault, ""))
        except jax.errors.JaxRuntimeError:
            return  # With process 0 the store is gone too; the others notice its end.

    def diagnose(self) -> ProcessError:
        """Finds out why a collective broke: each live process writes a key at once."""
        alive: set[int] = set()
        try:
            self._set(f"{ROOT}/alive/{self.index}", {})
            deadline = time.monotonic() + 10 * POLL_S
            while time.monotonic() < deadline:
                if not self._read_faults(self._phases + 1):
                    break
                alive = {r["process"] for r in self._records(f"{ROOT}/alive/")}
                time.sleep(POLL_S)
            lost = sorted(set(range(self.count)) - alive)
        except ProcessError as cause:
            return cause
        except jax.errors.JaxRuntimeError:
            # The store is gone, and the runtime about to abort this process.
            time.sleep(ABORT_S)
            lost = [0]
        return self._lost(lost, "a collective")

    def _wait_with_fault(self, phase: str, fault: BaseException) -> None:
        """Waits until the others have read of a fault, unless they are out of reach."""
        try:
            for name in (phase, REPORTED):
                if not self._wait(name, timeout_s=FAULT_TIMEOUT_S):
                    self.leave(fault)
                    return
        except ProcessError:
            self.leave(fault)

    def _wait(self, phase: str, timeout_s: float = FOREVER_MS / 1000) -> bool:
        """Waits at the barrier of a phase; returns whether all came in time.

        The main thread stays in Python meanwhile, where it can handle signals.
        """
        ended = _in_thread(
            lambda: self.client.wait_at_barrier(f"{ROOT}/{phase}", FOREVER_MS)
        )
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                _, broken = ended.get(timeout=POLL_S)
            except queue.Empty:
                if time.monotonic() > deadline:
                    return False
                self._check_others(phase)
                continue
            if broken is not None:
                # The runtime is about to abort this process, with a line of ours.
                time.sleep(ABORT_S)
                raise self._lost(_dead(str(broken)), phase) from broken
            return True

    def _check_others(self, phase: str) -> None:
        """Raises where another process has failed, or waits at another phase."""
        if not self._read_faults(self._phases, phase):
            return
        here = {"phase": phase, "number": self._phases}
        try:
            self._set(f"{ROOT}/waiting/{self.index}", here)
            others = self._records(f"{ROOT}/waiting/")
        except jax.errors.JaxRuntimeError:
            return
        for other in others:
            if other["number"] == self._phases and other["phase"] != phase:
                error = ProcessError(
                    f"processes are at different phases: process {self.index} at "
                    f"{phase!r}, process {other['process']} at {other['phase']!r}",
                    other["process"],
                )
                # Reported: this process may go on before the other looks again.
                self.leave(error)
                raise error

    def _read_faults(self, number: int, phase: str | None = None) -> bool:
        """Raises where another process failed outside this phase, or at another phase.

        Returns whether the store could be read: without it, what waits fails soon.
        """
        try:
            records = self._records(f"{ROOT}/faults/")
            messages = self._records(self._folder(number))
        except jax.errors.JaxRuntimeError:
            return False
        try:
            # Reports at this very phase are read when all have come to it.
            _raise_first(
                records + [r for r in messages if r.get("phase", phase) != phase]
            )
        except ProcessError as cause:
            self.leave(cause, is_own=False)
            raise
        return True

    def _folder(self, number: int) -> str:
        return f"{ROOT}/messages/{number}/"

    def _lost(self, processes: list[int], phase: str) -> ProcessError:
        names = ", ".join(map(str, processes)) or "unknown"
        verb = "answer" if len(processes) > 1 else "answers"
        error = ProcessError(
            f"process {names} no longer {verb}: it was killed, or its machine is out "
            f"of reach; noticed in {phase}",
            processes[0] if len(processes) == 1 else None,
        )
        self.leave(error, is_own=False)
        return error

    def _record(self, fault: BaseException, phase: str) -> dict[str, Any]:
        """Describes a fault, numbered in the order in which processes had theirs."""
        return {
            "phase": phase,
            "type": type(fault).__name__,
            "message": " ".join(str(fault).split()),
            "order": self.client.key_value_increment(f"{ROOT}/order", 1),
        }

    def _set(self, key: str, record: dict[str, Any]) -> None:
        text = json.dumps({"process": self.index, **record})
        self.client.key_value_set(key, text, allow_overwrite=True)

    def _records(self, folder: str) -> list[dict[str, Any]]:
        return [json.loads(text) for _, text in self.client.key_value_dir_get(folder)]

    def wait_for_exit(self) -> None:
        """Waits at most a few seconds for the others to come to their end too.

        If all come, they disconnect together, as at the end of a run without a fault.
        """
        here = threading.Thread(target=self._disconnect_with_all, daemon=True)
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        here.start()
        # Longer than the barrier waits: a native call that returns while Python ends
        # aborts the process.
        here.join(EXIT_TIMEOUT_S + ABORT_S)
        if self.index == 0 and distributed.global_state.service is not None:
            # A process that gave up waiting still ends, and would be aborted in that.
            time.sleep(max(0.0, deadline - time.monotonic()))

    def _disconnect_with_all(self) -> None:
        try:
            self.client.wait_at_barrier(f"{ROOT}/exit", EXIT_TIMEOUT_S * 1000)
            distributed.global_state.shutdown()
            for thread in _waiting:
                # Their calls fail as the client is gone, and end as this one does.
                thread.join(1.0)
        except jax.errors.JaxRuntimeError:
            pass  # Someone is gone already, or does something else.

    def _disconnect(self) -> None:
        """Runs at exit, before jax would wait for processes that may never come."""
        self.wait_for_exit()
        state = distributed.global_state
        if state.client is None:
            return
        # Destroyed while clients are connected, the service makes them abort. What a
        # daemon thread refers to is not destroyed before the process ends.
        kept = (state.client, state.service)
        threading.Thread(target=_keep, args=kept, daemon=True).start()
        state.client = state.service = None


def _in_thread(call: Callable[[], Any]) -> "queue.SimpleQueue[Any]":
    """Runs a call in a thread; the queue receives its result and its exception."""
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((call(), None))
        except Exception as fault:
            ended.put((None, fault))

    thread = threading.Thread(target=run, daemon=True)
    _waiting[:] = [other for other in _waiting if other.is_alive()] + [thread]
    thread.start()
    return ended


_waiting: list[threading.Thread] = []
"""Threads whose native calls have not returned yet."""


def _keep(*_: Any) -> None:
    threading.Event().wait()


def _raise_first(records: list[dict[str, Any]]) -> None:
    """Raises the first of the faults that other processes recorded."""
    faults = sorted((r for r in records if "type" in r), key=lambda r: r["order"])
    if faults:
        first = faults[0]
        where = f" in {first['phase']}" if first["phase"] else ""
        raise ProcessError(
            f"process {first['process']} failed{where}: "
            f"{first['type']}: {first['message']}",
            first["process"],
        )


_CONNECTION = re.compile(
    r"\bgloo\b|\bnccl|\brccl|heartbeat timeout|coordination service|barrier failed",
    re.IGNORECASE,
)
"""Text in the exception of a collective when a peer is gone."""


def _dead(text: str) -> list[int]:
    """Returns the processes that a message of the runtime calls dead."""
    named = [int(i) for i in re.findall(r"[Tt]ask (\d+) heartbeat", text)]
    # Without its coordinator, which is process 0, the runtime fails by other words.
    return sorted(set(named)) or [0]


def _filter_native_messages() -> None:
    """Sends what native code writes to stderr through `dew.native_messages`.

    Python's own stderr stays what it is, a terminal for example.
    """
    try:
        is_native = sys.stderr.fileno() == 2
    except (AttributeError, OSError):
        return  # A notebook's, or a test's: native code writes elsewhere.
    if not is_native:
        return
    sys.stderr.flush()
    original = os.dup(2)
    program = Path(__file__).with_name("native_messages.py")
    reader = subprocess.Popen(
        [sys.executable, "-I", "-S", str(program)],
        stdin=subprocess.PIPE,
        stdout=original,
        stderr=original,
        # A signal to the terminal's group is for this process, not for its reader.
        start_new_session=True,
    )
    assert reader.stdin is not None
    os.dup2(reader.stdin.fileno(), 2)
    reader.stdin.close()
    sys.stderr = os.fdopen(original, "w", buffering=1, errors="backslashreplace")
    _readers.append(reader)


_readers: list["subprocess.Popen[bytes]"] = []
"""Kept: a reader ends by itself, after this process and all that jax says at exit."""
