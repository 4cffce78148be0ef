"""Processes that start, stop and end together: small programs in place of commands."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dew.cli.child_output import ChildOutput
from dew.cli.children import Children
from tests.support.launched import is_alive

PROGRAM = """
import os, signal, sys, time
index = int(os.environ["PLACE"])
"""


def children(body: str, count: int = 2) -> Children:
    """Processes of one program, which knows its place and ends when it is told to."""
    command = [sys.executable, "-S", "-c", PROGRAM + body]
    environments = [{**os.environ, "PLACE": str(i)} for i in range(count)]
    return Children(command, environments, own_end_s=0.5, terminated_s=0.5)


def signalled(run: Children, *numbers: int, when: Callable[[], bool]) -> int:
    """Runs processes and sends signals to this one once `when` is true."""

    def send() -> None:
        while not when():
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    # Under nohup or a shell's & they are ignored, and the launcher leaves it at that.
    before = {n: signal.signal(n, signal.SIG_DFL) for n in set(numbers)}
    thread = threading.Thread(target=send)
    thread.start()
    try:
        return run.run()
    finally:
        thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_that_is_ignored_stays_ignored(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = children("print(signal.getsignal(1) is signal.SIG_IGN, file=sys.stderr)")
        assert run.run() == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capfd.readouterr().err == "True\n"


def last_line(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err.strip().splitlines()[-1]


def test_the_first_error_is_the_last_line_and_its_code_the_exit_code(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = children(
        """
if index == 1:
    print("dew: error: row 7 is no text", file=sys.stderr, flush=True)
    sys.exit(2)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
    )
    began = time.monotonic()
    assert run.run() == 2
    assert time.monotonic() - began < 5
    assert last_line(capfd) == "dew: error: process 1: row 7 is no text"


def test_an_error_of_all_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    body = 'print("dew: error: no text", file=sys.stderr); sys.exit(2)'
    assert children(body, 3).run() == 2
    assert capfd.readouterr().err == "dew: error: no text\n"


@pytest.mark.parametrize(("origin", "tag"), [(0, ""), (1, "process 1: ")])
def test_a_cause_is_printed_in_the_words_of_the_process_that_has_it(
    origin: int, tag: str, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"""
where = "" if index == {origin} else "process {origin} failed: ValueError: "
print(f"dew: error: {{where}}no text", file=sys.stderr, flush=True); sys.exit(2)
"""
    assert children(body).run() == 2
    assert capfd.readouterr().err == f"dew: error: {tag}no text\n"


def test_another_error_is_printed_before_the_first(
    capfd: pytest.CaptureFixture[str],
) -> None:
    body = """
if index == 0: time.sleep(0.3)
print(f"dew: error: fault {index}", file=sys.stderr, flush=True); sys.exit(2 + index)
"""
    assert children(body).run() == 3
    said = "dew: error: fault 0\ndew: error: process 1: fault 1\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("os.kill(os.getpid(), 9)", 137, "process 1 was ended by SIGKILL"),
        ("os.abort()", 134, "process 1 was ended by SIGABRT"),
        ("os.kill(os.getpid(), 15)", 143, "process 1 was ended by SIGTERM"),
        ("sys.exit(3)", 3, "process 1 ended with exit code 3"),
        (
            "{}['x']",
            1,
            "process 1: KeyError: 'x' (DEW_TRACEBACK=1 prints where)",
        ),
    ],
)
def test_a_death_without_a_word_is_named(
    end: str, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = children(f"if index == 1: {end}\ntime.sleep(60)")
    assert run.run() == code
    assert capfd.readouterr().err == f"dew: error: {said}\n"


STOPS = """
def stop(number, _):
    print("signal", number, os.getsid(0) == os.getpid(), file=sys.stderr, flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
open(os.environ["READY"] + str(index), "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "got", "code"),
    [
        (signal.SIGTERM, 15, 143),
        (signal.SIGINT, 2, 130),
        (signal.SIGHUP, 15, 143),
    ],
)
def test_a_signal_reaches_every_process_once_and_is_no_error(
    sent: int,
    got: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("READY", str(tmp_path / "ready"))
    run = children(STOPS)
    ready = lambda: len(list(tmp_path.iterdir())) == 2
    assert signalled(run, sent, when=ready) == code
    # Both print the same line, which is shown once; each is in a session of its own.
    assert capfd.readouterr().err == f"signal {got} True\n"


def test_a_second_signal_ends_all_at_once_with_what_they_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READY", str(tmp_path / "ready"))
    body = """
import subprocess
signal.signal(signal.SIGINT, signal.SIG_IGN)
helper = subprocess.Popen(["sleep", "60"])
with open(os.environ["READY"] + str(index) + ".part", "w") as file:
    file.write(str(helper.pid))
os.rename(file.name, file.name.removesuffix(".part"))
time.sleep(60)
"""
    run = children(body)
    began = time.monotonic()
    ready = lambda: len([p for p in tmp_path.iterdir() if not p.suffix]) == 2
    assert signalled(run, signal.SIGINT, signal.SIGINT, when=ready) == 130
    assert time.monotonic() - began < 10
    for file in tmp_path.iterdir():
        assert not is_alive(int(file.read_text()))


def test_lines_of_several_processes_stay_whole(
    capfd: pytest.CaptureFixture[str],
) -> None:
    body = """
for n in range(300):
    for part in range(20):
        sys.stderr.write(f"{index}.{n} ")
        sys.stderr.flush()
    sys.stderr.write("\\n")
"""
    assert children(body).run() == 0
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"{i}.{n} " * 20 for i in (0, 1) for n in range(300))


@pytest.mark.parametrize(
    "line",
    [
        "[Gloo] Rank 0 is connected to 1 peer ranks.",
        "I1201 05:30:08.123456  123 coordination_service.cc:10] started",
        "E0929 17:42:48.594192 1044529 coordination_service_agent.cc:332] Polled",
        "2024-07-29 17:14:59.920189: E external/xla/xla/service/rendezvous.cc:38] This",
        "*** Check failure stack trace: ***",
        "    @     0x7f5b1c0d2e24  (unknown)",
        "WARNING: All log messages before absl::InitializeLog() is called are written",
    ],
)
def test_what_the_libraries_log_is_not_shown(line: str) -> None:
    output = ChildOutput()
    assert not output.shown(line)
    assert output.error is None


def test_a_traceback_leaves_its_last_line_and_a_complaint_is_kept_apart() -> None:
    output = ChildOutput()
    shown = [
        line
        for line in (
            "step 4: loss 1.0",
            "Traceback (most recent call last):",
            '  File "x.py", line 1, in <module>',
            "    {}['x']",
            "ValueError: a row of 3",
            "step 5: loss 1.0",
        )
        if output.shown(line)
    ]
    assert shown == ["step 4: loss 1.0", "step 5: loss 1.0"]
    assert output.raised == "ValueError: a row of 3"
    assert not output.shown("dew: error: a row of 3")
    assert output.error == "a row of 3"
