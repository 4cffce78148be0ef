"""Leaves that a run holds: not written, hashed, and the same on resume or refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from dew.losses.supervised import Classification
from dew.objectives.base import Aux, EMASpec, Step
from dew.objectives.causal_lm import CausalLM
from dew.objectives.supervised import Supervised
from dew.source import Source
from dew.training.checkpoint import Checkpoints
from dew.training.held import held_hashes, held_paths, leaf_hash, supplied_paths
from dew.training.optimizers import adamw
from dew.training.sharding import make_mesh
from dew.training.step import TrainStep
from dew.training.trainer import Trainer
from dew.tree import flatten
from tests.support.models import PIXELS, TEXT, Perceptron, loaded, tiny_decoder
from tests.support.objectives import (
    Composite,
    Counting,
    Toy,
    as_mean,
    as_moments,
    microbatch,
)
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


def test_hashes_are_those_of_earlier_versions() -> None:
    source = loaded(tiny_decoder(), TEXT)
    objective = CausalLM(
        source=source, seq_len=6, trainable=is_norm, param_dtype=jnp.bfloat16
    )
    variables = objective.init(jax.random.key(0))
    supplied = supplied_paths(objective.initializer)
    hashes = held_hashes(variables, held_paths(objective, supplied, variables, None))
    # As written by the version before hashes were made leaf by leaf.
    want = {
        "embed/weight": "bd28e0c9b7c3d49a10d8b080f543d7a3",
        "layers/0/attn/q/weight": "7f95396e5026970b1a96a2ebca28a135",
        "layers/0/mlp/down/weight": "187967d5667bbfc2211d53987f881f28",
    }
    assert {name: hashes[f"variables/frozen/{name}"][:32] for name in want} == want
    assert len(hashes) == 9


class Rounds:
    """The same numbers for ever, from a place that can be saved."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> "Rounds":
        return self

    def __next__(self) -> Any:
        self.place += 1
        return microbatch(self.place)

    def get_state(self) -> dict[str, Any]:
        return {"place": self.place}

    def set_state(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def with_tower(params: Any, batch: Any, step: Step) -> Any:
    """Squared errors after a frozen tower, which no collection declares."""
    seen = {**batch, "x": batch["x"] * params["tower"]["scale"][None]}
    return as_mean(params, seen, step)


def with_moments(params: Any, batch: Any, step: Step) -> Any:
    seen = {**batch, "x": batch["x"] * params["tower"]["scale"][None]}
    return as_moments(params, seen, step)


def with_counts(params: Any, batch: Any, step: Step) -> Any:
    stats, aux = with_tower(params, batch, step)
    return stats, replace(aux, effects={"count": jnp.sum(batch["weight"])})


def with_means(params: Any, batch: Any, step: Step) -> Any:
    stats, _ = with_tower(params, batch, step)
    return stats, Aux(variables={"seen": {"count": jnp.mean(batch["x"])}})


START = {
    "params": {"w": jnp.asarray([0.5, -1.0, 2.0])},
    "tower": {"scale": jnp.asarray([1.0, 2.0, 3.0])},
}
MOVING = {**START, "seen": {"count": jnp.float32(0)}}
HALF = EMASpec(lambda n: 0.5)


def fitted(objective: Toy, folder: Path, steps: int = 2, **settings: Any) -> Any:
    """The state and the checkpoints of a run, continued where the folder has some."""
    kept = Checkpoints(folder, every=1)
    trainer = Trainer(
        objective, adamw(1e-2), key=jax.random.key(0), checkpoints=kept, **settings
    )
    return trainer.fit(Rounds(), steps=steps, resume=True), kept


TOWERS = {
    "mean": Toy(of=with_tower, start=START, ema=HALF),
    "composite": Composite(of=with_moments, start=START, ema=HALF),
    "effects": Counting(of=with_counts, start=MOVING, ema=HALF),
    "replacements": Toy(of=with_means, start=MOVING, ema=HALF),
}


@pytest.mark.parametrize("kind", TOWERS)
def test_a_frozen_tower_needs_no_declaration(kind: str, tmp_path: Path) -> None:
    objective = TOWERS[kind]
    state, kept = fitted(objective, tmp_path, accumulation=2)
    meta = written(kept)
    assert list(meta["held"]) == ["variables/tower/scale"]
    assert not [name for name in meta["leaves"] if "tower" in name]
    # What the loss moves, at once or by effects, is averaged and written though it was
    # supplied.
    moving = {"seen"} if "seen" in state.variables else set()
    assert set(state.ema) == {"params", *moving}
    names = {f"{tree}/seen/count" for tree in ("variables", "ema")}
    assert names & set(meta["leaves"]) == (names if moving else set())
    if kind == "composite":
        assert state.window.replay.collections == {}
    whole, _ = fitted(objective, tmp_path / "whole", 3, accumulation=2)
    again, _ = fitted(objective, tmp_path, 3, accumulation=2)
    for path, leaf in flatten(whole.variables).items():
        np.testing.assert_array_equal(leaf, flatten(again.variables)[path])


def test_another_tower_is_refused(tmp_path: Path) -> None:
    fitted(TOWERS["mean"], tmp_path)
    other = {**START, "tower": {"scale": jnp.ones(3)}}
    with pytest.raises(ValueError, match=r"tower/scale: then held \w+, now held \w+"):
        fitted(Toy(of=with_tower, start=other, ema=HALF), tmp_path, 3)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tower_that_was_written_must_be_the_same(
    is_same: bool, tmp_path: Path
) -> None:
    objective = Toy(of=with_tower, start=START)
    step = TrainStep(objective=objective, optimizer=adamw(1e-2).transform)
    state = jax.jit(step.initial)(objective.initializer, jax.random.key(0))
    kept = Checkpoints(tmp_path)
    kept.save(state, objective, data={"place": 0}, held=())
    kept.close()
    tower = {"scale": START["tower"]["scale"] + (0 if is_same else 1)}
    now = Toy(of=with_tower, start={**START, "tower": tower})
    if is_same:
        assert int(fitted(now, tmp_path, 1)[0].commits) == 1
    else:
        with pytest.raises(ValueError, match=r"tower/scale: saved with .* now held"):
            fitted(now, tmp_path, 1)


def test_supplied_running_averages_are_written_and_averaged(tmp_path: Path) -> None:
    source = loaded(Perceptron(norm=True), PIXELS)
    objective = Supervised(
        source=source,
        reads={"pixels": jax.ShapeDtypeStruct((5,), jnp.float32)},
        criterion=Classification(),
        collections=("batch_stats",),
        ema=HALF,
    )
    pixels = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    batch = {"pixels": pixels, "labels": np.asarray([0, 1, 2, 0])}
    kept = Checkpoints(tmp_path, every=1)
    trainer = Trainer(objective, adamw(1e-2), key=jax.random.key(0), checkpoints=kept)

    class Same(Rounds):
        def __next__(self) -> Any:
            return batch

    state = trainer.fit(Same(), steps=1)
    assert written(kept)["held"] == {}
    assert "variables/batch_stats/BatchNorm_0/mean" in written(kept)["leaves"]
    assert set(state.ema) == {"params", "batch_stats"}


def test_held_variables_are_read_once_and_no_init_runs_outside_a_trace(
    tmp_path: Path,
) -> None:
    reads, untraced = [], []

    class Counted(CausalLM):
        def held_variables(self) -> Any:
            reads.append(1)
            return super().held_variables()

        def init(self, key: Any, variables: Any = None) -> Any:
            untraced.append(not isinstance(key, Tracer))
            return super().init(key, variables)

    source = loaded(tiny_decoder(), {"tokens": jax.ShapeDtypeStruct((1, 12), "int32")})
    for steps, resume in ((2, False), (4, True)):
        trainer = Trainer(
            Counted(source=source, seq_len=12, trainable=is_norm),
            adamw(1e-2),
            key=jax.random.key(0),
            checkpoints=Checkpoints(tmp_path, every=1),
        )
        trainer.fit(Rows(), steps=steps, resume=resume)
    assert len(reads) == 2
    assert not any(untraced)


def test_a_leaf_that_is_split_over_devices_has_the_hash_of_the_whole() -> None:
    whole = jnp.arange(64, dtype=jnp.bfloat16).reshape(16, 4)
    mesh = make_mesh(fsdp=8)
    split = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("fsdp")))
    assert len({shard.device for shard in split.addressable_shards}) == 8
    assert leaf_hash(split) == leaf_hash(whole) == leaf_hash(np.asarray(whole))
    key = jax.random.key(3)
    assert leaf_hash(key) == leaf_hash(jax.random.key_data(key))


def test_hashes_are_made_in_one_order_in_every_process() -> None:
    paths = [("frozen", name) for name in "zaxbyc"]
    variables = {"frozen": {name: np.zeros(1) for name in "zaxbyc"}}
    assert list(held_hashes(variables, frozenset(paths))) == [
        f"variables/frozen/{name}" for name in "abcxyz"
    ]
