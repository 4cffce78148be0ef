"""Leaves that a run holds: not written, hashed, and the same on resume or refused."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dew.objectives.causal_lm import CausalLM
from dew.source import Source
from dew.training.checkpoint import Checkpoints
from dew.training.optimizers import adamw
from dew.training.trainer import Trainer
from dew.tree import flatten
from tests.support.models import tiny_decoder
from tests.support.runs import Losses, Rows

HELD = "variables/frozen/layers/0/attn/q/weight"


def is_norm(path: tuple[str, ...]) -> bool:
    return "norm" in path[-2]


def drawn(seed: int = 0) -> Any:
    objective = CausalLM(source=Source(model=tiny_decoder()), seq_len=12)
    return objective.init(jax.random.key(seed))


def run(folder: Path, variables: Any, steps: int, *, resume: bool = False) -> Any:
    """Trains the norms alone over loaded weights, or over drawn ones where None."""
    source = Source(model=tiny_decoder(), variables=variables)
    objective = CausalLM(source=source, seq_len=12, trainable=is_norm)
    seen, kept = Losses(), Checkpoints(folder, every=1)
    trainer = Trainer(
        objective,
        adamw(1e-2),
        key=jax.random.key(0),
        checkpoints=kept,
        callbacks=[seen],
    )
    state = trainer.fit(Rows(), steps=steps, resume=resume)
    return state, seen.losses, kept


def written(kept: Checkpoints) -> dict[str, Any]:
    """What the newest checkpoint says it holds."""
    file = kept.folder / str(kept.latest()) / "meta" / "metadata"
    return json.loads(file.read_text())


def test_held_leaves_are_hashed_and_not_written(tmp_path: Path) -> None:
    _, _, kept = run(tmp_path, drawn(), 1)
    meta = written(kept)
    assert HELD in meta["held"]
    assert not [name for name in meta["leaves"] if "frozen" in name]


def test_a_run_over_held_leaves_resumes_with_equal_losses(tmp_path: Path) -> None:
    weights = drawn()
    state, whole, _ = run(tmp_path / "whole", weights, 3)
    _, first, _ = run(tmp_path / "parts", weights, 2)
    again, rest, _ = run(tmp_path / "parts", weights, 3, resume=True)
    assert first + rest == whole
    for path, leaf in flatten(state.variables).items():
        np.testing.assert_array_equal(leaf, flatten(again.variables)[path])


def test_resuming_over_other_weights_is_refused(tmp_path: Path) -> None:
    run(tmp_path, drawn(), 1)
    with pytest.raises(ValueError, match=r"variables/frozen/.*then held .*now held"):
        run(tmp_path, drawn(seed=1), 2, resume=True)


def test_held_leaves_drawn_from_a_key_are_written(tmp_path: Path) -> None:
    _, _, kept = run(tmp_path, None, 1)
    assert HELD in written(kept)["leaves"]
    assert written(kept)["held"] == {}


def test_held_leaves_have_no_optimizer_state(tmp_path: Path) -> None:
    state, _, _ = run(tmp_path, drawn(), 1)
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer))
    trained = sum(leaf.size for leaf in flatten(state.variables["params"]).values())
    assert moments <= 2 * trained + 8
