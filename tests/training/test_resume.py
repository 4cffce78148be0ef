"""Runs that go on elsewhere: on another mesh, other processes, another path."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dew.training.checkpoint import Checkpoints
from dew.training.sharding import make_mesh
from tests.support.processes import run_processes
from tests.support.runs import Losses, Rows, trainer
from tests.support.tolerances import RTOL


def losses_of(steps: int, folder: Path, *, resume: bool, **axes: int) -> list[float]:
    seen = Losses()
    ways = int(np.prod(list(axes.values())))
    mesh = make_mesh(**axes, devices=jax.devices()[:ways]) if axes else None
    kept = Checkpoints(folder, every=1)
    run = trainer(callbacks=[seen], checkpoints=kept, mesh=mesh)
    run.fit(Rows(), steps=steps, log_every=1, resume=resume)
    return seen.losses


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of four uninterrupted commits on one device."""
    return losses_of(4, tmp_path_factory.mktemp("whole"), resume=False)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}),
        pytest.param({}, {"fsdp": 8}, marks=pytest.mark.full),
        pytest.param({"fsdp": 4, "tensor": 2}, {}, marks=pytest.mark.full),
        pytest.param({"data": 2, "fsdp": 1}, {"fsdp": 4}, marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_with_the_same_losses_on_another_mesh(
    first: dict[str, int], second: dict[str, int], whole: list[float], tmp_path: Path
) -> None:
    losses = losses_of(2, tmp_path / "run", resume=False, **first)
    moved = shutil.move(tmp_path / "run", tmp_path / "moved")
    losses += losses_of(4, Path(moved), resume=True, **second)
    # The largest difference seen is 8.7e-8.
    np.testing.assert_allclose(losses, whole, rtol=RTOL["float32"])


def on_processes(folder: Path, count: int, steps: int, fsdp: int) -> list[Any]:
    arguments = (str(folder / "run"), str(steps), str(folder / "losses"), str(fsdp))
    ended = run_processes(
        "tests.support.resumed", *arguments, folder=folder / "console", count=count
    )
    assert [one.code for one in ended] == [0] * count, ended
    return list(ended)


@pytest.mark.full
def test_a_run_goes_on_with_the_same_losses_on_other_numbers_of_processes(
    whole: list[float], tmp_path: Path
) -> None:
    on_processes(tmp_path, 2, 1, fsdp=2)
    on_processes(tmp_path, 1, 2, fsdp=1)
    on_processes(tmp_path, 2, 3, fsdp=1)
    losses = tmp_path / "losses"
    shutil.rmtree(tmp_path / "run" / "3" / "state" / "d")
    ended = on_processes(tmp_path, 2, 4, fsdp=2)
    # What one process finds damaged is damaged for all: commit 3 is made once more.
    assert "that of commit 2 is taken in its place" in ended[0].err
    assert ended[1].err.strip() == ""
    values = [
        float.fromhex(line.split()[1])
        for line in losses.read_text().split("\n")
        if line
    ]
    np.testing.assert_allclose(values, [*whole[:3], *whole[2:]], rtol=RTOL["float32"])
