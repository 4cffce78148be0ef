"""Runs of two real processes: well, with faults, with signals, and with deaths."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.parallel_runs import Here, Outcome
from tests.support.processes import Ended, run_processes
from tests.support.tolerances import RTOL

QUICK = [
    *("trains", "fsdp", "data 1", "ends 1", "metric 1", "preview 1", "save 1"),
    *("sigterm 1", "resumes 1", "killed 0"),
]
OTHER = [
    *("data 0", "ends 0", "goes_on 0", "metric 0", "preview 0", "own_phase 0"),
    *("own_phase 1", "callback 0", "callback 1", "save 0", "tracker"),
    *("sigterm 0", "resumes 0", "sigint 0", "sigint 1", "killed 1"),
]
FAULTS = {
    "data": "the next batch: KeyError: 'a row without text'",
    "metric": "an evaluation's batch: ZeroDivisionError: a metric without a mass",
    "preview": "preview: LookupError: no font",
    "own_phase": "drawing: KeyError: 'no tree'",
    "callback": "the log: LookupError: no log",
    "save": "the save's report: LookupError: no room",
}

Outcomes = list[dict[str, Outcome]]


def outcomes(ended: Ended) -> dict[str, Outcome]:
    """What each case gave; gloo's own lines stand between."""
    lines = [line[line.find("{") :] for line in ended.out.splitlines() if "{" in line]
    return {
        case: outcome for line in lines for case, outcome in json.loads(line).items()
    }


class Start:
    """One start of two processes, and what its cases gave."""

    def __init__(self, folder: Path, cases: list[str]) -> None:
        self.folder = folder
        self.ended = run_processes(
            "tests.support.parallel_runs",
            str(folder / "runs"),
            *cases,
            folder=folder,
            timeout_s=300,
        )
        self.given: Outcomes = [outcomes(process) for process in self.ended]

    def __getitem__(self, case: str) -> list[Outcome]:
        told = "\n".join(process.err for process in self.ended)
        assert all(case in given for given in self.given), told
        return [given[case] for given in self.given]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("other"), OTHER)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Here:
    return Here(0, 1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def whole(alone: Here) -> Outcome:
    """The same run in one process, which has the whole of every batch."""
    return alone.run("trains")


def kinds(*names: str) -> pytest.MarkDecorator:
    """Each kind in the process where `make test` has it, and in the other one."""
    return pytest.mark.parametrize(
        ("case", "start"),
        [
            *(pytest.param(c, "quick") for c in QUICK if c.split()[0] in names),
            *(
                pytest.param(c, "other", marks=pytest.mark.full)
                for c in OTHER
                if c.split()[0] in names
            ),
        ],
    )


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=RTOL["reordered"])


def losses(outcome: Outcome) -> list[float]:
    return [float.fromhex(loss) for loss in outcome["losses"]]


@pytest.mark.parametrize("case", ["trains", "fsdp"])
def test_two_processes_train_as_one_does_on_the_same_global_batch(
    quick: Start, whole: Outcome, case: str
) -> None:
    for outcome in quick[case]:
        close(losses(outcome), losses(whole))
        close(outcome["sums"], whole["sums"])
    assert quick[case][0]["losses"] == quick[case][1]["losses"]


@pytest.mark.parametrize("case", ["trains", "fsdp"])
def test_unequal_parts_of_a_validation_set_give_the_metrics_of_the_whole(
    quick: Start, whole: Outcome, case: str
) -> None:
    expected = whole["evaluations"]["4"]
    for outcome in quick[case]:
        metrics = outcome["evaluations"]["4"]
        assert metrics.keys() == expected.keys()
        assert metrics["held_out/tokens"] == expected["held_out/tokens"]
        close(list(metrics.values()), list(expected.values()))


@kinds(*FAULTS)
def test_a_fault_in_one_process_ends_both_and_is_named_in_one_line(
    request: pytest.FixtureRequest, case: str, start: str
) -> None:
    given = request.getfixturevalue(start)[case]
    kind, rank = case.split()
    own, others = given[int(rank)], given[1 - int(rank)]
    said = FAULTS[kind]
    assert own["fault"] == said.split(": ", 1)[1]
    assert others["fault"] == f"ProcessError: process {rank} failed in {said}"
    assert max(outcome["seconds"] for outcome in given) < 60


@kinds("ends")
def test_data_that_ends_early_in_one_process_ends_both_after_a_save(
    request: pytest.FixtureRequest, case: str, start: str
) -> None:
    for outcome in request.getfixturevalue(start)[case]:
        assert f"the data ended in process {case[-1]} after 2 of 4" in outcome["fault"]
        assert outcome["saved"] == [2]


@kinds("goes_on")
def test_a_run_whose_data_ended_in_one_process_resumes_where_it_was(
    request: pytest.FixtureRequest, quick: Start, case: str, start: str
) -> None:
    for outcome in request.getfixturevalue(start)[case]:
        assert outcome["sums"] == quick["trains"][0]["sums"]
        assert outcome["losses"] == quick["trains"][0]["losses"][2:]


@pytest.mark.full
def test_a_tracker_that_throws_is_named_and_the_run_goes_on(
    quick: Start, other: Start
) -> None:
    first, second = other["tracker"]
    assert first["faults"] == ["failing: OSError: no room for logs"]
    assert first["losses"] == second["losses"] == quick["trains"][0]["losses"]


@kinds("sigterm", "sigint")
def test_a_signal_to_one_process_stops_both_at_one_commit_with_one_checkpoint(
    request: pytest.FixtureRequest, case: str, start: str
) -> None:
    code = 143 if case.startswith("sigterm") else 130
    for outcome in request.getfixturevalue(start)[case]:
        assert outcome["code"] == code
        assert outcome["saved"] == [2]
        assert outcome["handlers"]


@kinds("resumes")
def test_a_stopped_run_resumes_bit_equal(
    request: pytest.FixtureRequest, quick: Start, case: str, start: str
) -> None:
    for outcome in request.getfixturevalue(start)[case]:
        assert outcome["losses"] == quick["trains"][0]["losses"][2:]
        assert outcome["sums"] == quick["trains"][0]["sums"]


def test_one_process_resumes_the_run_of_two(
    quick: Start, alone: Here, whole: Outcome
) -> None:
    outcome = alone.fit(str(quick.folder / "runs" / "ends-1"), resume=True)
    close(losses(outcome), losses(whole)[2:])
    close(outcome["sums"], whole["sums"])


@kinds("killed")
def test_when_one_process_is_killed_the_other_says_so_in_one_line(
    request: pytest.FixtureRequest, case: str, start: str
) -> None:
    ended = request.getfixturevalue(start).ended
    killed, left = ended[int(case[-1])], ended[1 - int(case[-1])]
    assert killed.code == -signal.SIGKILL
    assert left.code != 0
    assert left.seconds - killed.seconds < 60
    assert f"process {case[-1]} no longer answers" in left.last_line
    assert "Check failure" not in left.err
    assert "Traceback" not in left.err
