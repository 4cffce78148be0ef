"""Damaged checkpoints: found, passed over with a line, or refused; never restored."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.objectives.base import AnyObjective
from dew.state import TrainState
from dew.training.checkpoint import Checkpoints, DamagedCheckpointError, Keep
from tests.support.runs import Losses, Rows, trainer

COMMITS = (1, 2)
"""The newest is damaged in most tests."""


@dataclass(frozen=True)
class Saved:
    """A folder with checkpoints of two commits, and what each of them holds."""

    folder: Path
    objective: AnyObjective
    states: dict[int, list[np.ndarray]]
    template: TrainState

    def copy(self, folder: Path) -> Path:
        return shutil.copytree(self.folder, folder, dirs_exist_ok=True)

    def restore(self, folder: Path, **settings: Any) -> tuple[TrainState, Any]:
        kept = Checkpoints(folder, **settings)
        try:
            return kept.restore(self.template, self.objective)
        finally:
            kept.close()

    def commit_of(self, state: TrainState) -> int | None:
        """Returns the commit whose saved state this is bit for bit, None if none."""
        found = bits(state)
        for commit, expected in self.states.items():
            if all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)):
                return commit
        return None


def bits(state: TrainState) -> list[np.ndarray]:
    """Every leaf of a state as bytes: NaN and -0.0 are compared exactly, too."""
    raw = jax.tree.map(
        lambda x: jax.random.key_data(x) if is_key(x) else x, state, is_leaf=is_key
    )
    return [
        np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(raw)
    ]


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    states, kept = {}, Checkpoints(folder, every=1)
    run = trainer(checkpoints=kept)
    template = run.fit(Rows(), steps=1)
    states[1] = bits(template)
    states[2] = bits(run.fit(Rows(), steps=2, resume=True))
    kept.close()
    template = jax.tree.map(jnp.zeros_like, template)
    return Saved(folder, run.objective, states, template)


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(file for file in checkpoint.rglob("*") if file.is_file())


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)


def truncate(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(max(1, len(data)))])


def blank(file: Path, rng: random.Random) -> None:
    """Zeros in place of a part, as a lost block of a disk leaves them."""
    data = bytearray(file.read_bytes())
    start = rng.randrange(max(1, len(data)))
    stop = min(len(data), start + 64)
    data[start:stop] = bytes(stop - start)
    file.write_bytes(data)


def remove(file: Path, rng: random.Random) -> None:
    del rng
    file.unlink()


HARMS = {"flip": flip, "truncate": truncate, "blank": blank, "remove": remove}


def outcome(saved: Saved, folder: Path) -> str:
    try:
        state, position = saved.restore(folder)
    except DamagedCheckpointError:
        return "refused"
    commit = saved.commit_of(state)
    if commit is None or position != {"position": 2 * commit}:
        return "another state"
    return f"commit {commit}"


@pytest.mark.parametrize(
    "count", [24, pytest.param(400, marks=pytest.mark.full)], ids=["quick", "long"]
)
def test_no_damage_of_any_file_restores_another_state(
    count: int, saved: Saved, tmp_path: Path
) -> None:
    rng = random.Random(count)
    seen: list[str] = []
    for trial in range(count):
        folder = saved.copy(tmp_path / str(trial))
        file = rng.choice(files_of(folder / "2"))
        harm = rng.choice(list(HARMS))
        HARMS[harm](file, rng)
        seen.append(outcome(saved, folder))
        # Commit 2 where the damage is in bytes that say nothing, else the one before.
        assert seen[-1] in ("commit 1", "commit 2"), (harm, file)
        shutil.rmtree(folder)
    assert seen.count("commit 1") > count // 5


def test_a_flipped_bit_in_an_array_is_found_and_the_older_checkpoint_taken(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved.copy(tmp_path / "copy")
    # The one file in which the arrays of all processes are joined.
    (arrays,) = (folder / "2" / "state" / "d").iterdir()
    data = bytearray(arrays.read_bytes())
    data[len(data) // 3] ^= 4
    arrays.write_bytes(data)
    state, position = saved.restore(folder)
    assert (saved.commit_of(state), position) == (1, {"position": 2})
    said = capsys.readouterr().err
    assert f"the checkpoint of commit 2 in {folder} is damaged" in said
    assert "that of commit 1 is taken in its place" in said
    kept = Checkpoints(folder)
    assert kept.steps() == [1]
    assert f"{folder / 'damaged-2'}" in said
    assert (folder / "damaged-2").is_dir()


def exchange(folder: Path, first: str, second: str) -> None:
    """Exchanges two leaves of one shape in a checkpoint's list of checksums."""
    file = folder / "meta" / "metadata"
    meta = json.loads(file.read_text())
    sums = meta["checksums"]
    sums[first], sums[second] = sums[second], sums[first]
    file.write_text(json.dumps(meta))


Harm = Callable[[Path], None]


def clear(folder: Path) -> None:
    for file in files_of(folder):
        file.write_bytes(b"")


@pytest.mark.parametrize("harm", [clear, lambda folder: shutil.rmtree(folder / "meta")])
def test_without_an_intact_checkpoint_the_error_lists_every_one(
    harm: Harm, saved: Saved, tmp_path: Path
) -> None:
    folder = saved.copy(tmp_path / "copy")
    for commit in COMMITS:
        harm(folder / str(commit))
    with pytest.raises(DamagedCheckpointError, match=r"no intact.*commit 2:.*commit 1"):
        saved.restore(folder)
    # Nothing was renamed: what is left may be needed.
    assert {"1", "2"} <= {entry.name for entry in folder.iterdir()}


def test_a_checkpoint_asked_for_by_its_commit_has_no_substitute(
    saved: Saved, tmp_path: Path
) -> None:
    folder = saved.copy(tmp_path / "copy")
    clear(folder / "2" / "meta")
    kept = Checkpoints(folder)
    with pytest.raises(DamagedCheckpointError, match=r"commit 2: .*give step= one of"):
        kept.restore(saved.template, saved.objective, step=2)


def test_variables_alone_pass_over_a_damaged_checkpoint_and_leave_it(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved.copy(tmp_path / "copy")
    clear(folder / "2" / "state")
    kept = Checkpoints(folder)
    expected = Checkpoints(saved.folder).variables(step=1)
    jax.tree.map(np.testing.assert_array_equal, kept.variables(), expected)
    assert "that of commit 1 is taken in its place" in capsys.readouterr().err
    assert kept.steps() == [1, 2]


def test_without_verification_a_checkpoint_is_restored_as_it_is(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved.copy(tmp_path / "copy")
    exchange(folder / "2", "variables/params/embed/weight", "key")
    state, _ = saved.restore(folder, verify=False)
    assert saved.commit_of(state) == 2
    assert capsys.readouterr().err == ""
    state, _ = saved.restore(folder)
    assert saved.commit_of(state) == 1


def test_a_checkpoint_from_before_checksums_is_restored_with_a_line(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved.copy(tmp_path / "copy")
    file = folder / "2" / "meta" / "metadata"
    meta = json.loads(file.read_text())
    file.write_text(json.dumps({name: meta[name] for name in ("held", "leaves")}))
    state, _ = saved.restore(folder)
    assert saved.commit_of(state) == 2
    said = capsys.readouterr().err
    assert "commit 2" in said
    assert "is from before checkpoints had checksums, and is not verified" in said


def test_a_run_goes_on_from_the_older_checkpoint_with_the_same_losses(
    saved: Saved, tmp_path: Path
) -> None:
    whole, seen = Losses(), Losses()
    trainer(callbacks=[whole]).fit(Rows(), steps=4, log_every=1)
    folder = saved.copy(tmp_path / "copy")
    clear(folder / "2" / "state")
    kept = Checkpoints(folder, every=1, keep=Keep(last=3))
    run = trainer(callbacks=[seen], checkpoints=kept)
    run.fit(Rows(), steps=4, log_every=1, resume=True)
    assert seen.losses == whole.losses[1:]
    assert kept.steps() == [2, 3, 4]
