"""Phases that several processes agree on, by real processes, and by one alone."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from dew.training import agree_process_phase, process_phase
from tests.support import phases
from tests.support.processes import Ended, run_processes

APART = {"differs", "leaves", "process 0 killed", "process 1 killed"}
AGREED = [case for case in phases.CASES if case not in APART]


def outcomes(ended: Ended) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for line in ended.out.splitlines():
        if line.startswith("{"):
            merged |= json.loads(line)
    return merged


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("phases")
    ended = run_processes("tests.support.phases", *AGREED, "leaves", folder=folder)
    assert [process.code for process in ended] == [0, 0], ended[0].err + ended[1].err
    return [outcomes(process) for process in ended]


@pytest.mark.parametrize("case", ["goes on", "late", "still agrees"])
def test_a_phase_without_a_fault_passes_everywhere(
    agreed: list[dict[str, Any]], case: str
) -> None:
    assert [process[case] for process in agreed] == [None, None]


def test_every_process_hears_what_the_others_say(agreed: list[dict[str, Any]]) -> None:
    assert [process["messages"] for process in agreed] == [["", "stop"]] * 2
    assert [process["no messages"] for process in agreed] == [["", ""]] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_is_raised_where_it_happened_and_named_on_the_others(
    agreed: list[dict[str, Any]], rank: int
) -> None:
    own, other = agreed[rank], agreed[1 - rank]
    case = f"process {rank} fails"
    assert own[case].startswith("KeyError: ")
    assert other[case].startswith(f"ProcessError: process {rank} failed in preview: ")
    assert other[case].count("\n") == 0
    assert f"no tree\\nin process {rank}" in other[case]


def test_a_process_with_a_fault_of_its_own_raises_that(
    agreed: list[dict[str, Any]],
) -> None:
    assert all(process["both fail"].startswith("KeyError") for process in agreed)


def test_who_waits_hears_of_a_fault_outside_every_phase(
    agreed: list[dict[str, Any]],
) -> None:
    assert agreed[0]["leaves"] == (
        "ProcessError: process 1 failed: OSError: the disk is gone"
    )


def test_processes_at_different_phases_name_both(tmp_path: Path) -> None:
    ended = run_processes("tests.support.phases", "differs", folder=tmp_path)
    assert [process.code for process in ended] == [0, 0], ended[0].err + ended[1].err
    for process in ended:
        differs = outcomes(process)["differs"]
        assert "different phases" in differs
        assert "'save'" in differs
        assert "'preview'" in differs


@pytest.mark.parametrize(
    "rank", [pytest.param(0), pytest.param(1, marks=pytest.mark.full)]
)
def test_a_killed_process_ends_the_others_and_is_named_in_one_line(
    tmp_path: Path, rank: int
) -> None:
    case = f"process {rank} killed"
    ended = run_processes("tests.support.phases", case, folder=tmp_path)
    assert ended[rank].code == -signal.SIGKILL
    assert ended[1 - rank].code != 0
    assert max(process.seconds for process in ended) < 60 + 15
    lines = ended[1 - rank].err.strip().splitlines()
    assert len(lines) == 1, lines
    assert f"process {rank} no longer answers" in lines[0]


def test_one_process_alone_raises_its_fault_and_agrees_with_itself() -> None:
    agree_process_phase("step")
    with pytest.raises(KeyError, match="mine"), process_phase("preview"):
        raise KeyError("mine")
