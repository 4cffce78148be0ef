"""Weights of a split run go from their files straight to the devices that keep them."""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dew
from dew.cli.load import load_to_train
from dew.cli.pretrain import Pretrain
from dew.cli.train import prepare_model
from dew.converters.surgery.vocabulary import pad_vocabulary
from dew.objectives.base import EMASpec
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.objective import Distillation
from dew.objectives.distillation.teachers import ModelTeacher
from dew.training.optimizers import adamw
from dew.training.sharding import make_mesh, placement
from dew.training.trainer import Trainer
from dew.typing import Path as Place
from tests.support import hf_models as hf

SMALL_BYTES = 40_000
"""Norms and random keys, which every device has, and a leaf on its way."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 1.3 MB, most of it in matrices that eight devices divide."""
    large = hf.llama(
        hidden_size=64,
        intermediate_size=512,
        num_hidden_layers=3,
        num_key_value_heads=4,
    )
    return hf.save(large, tmp_path_factory.mktemp("model"))


def bytes_on_devices(known: set[int] | None = None) -> Counter[Any]:
    """Bytes of all live arrays on each device, beside those known before."""
    counts: Counter[Any] = Counter()
    for array in jax.live_arrays():
        if known is not None and id(array) in known:
            continue
        # By shapes: asking for the data of a shard would make another array of it.
        part = math.prod(array.sharding.shard_shape(array.shape))
        for device in array.sharding.addressable_devices:
            counts[device] += part * array.dtype.itemsize
    return counts


@dataclass
class Watched:
    """A placement that looks at every device's memory before each leaf is read."""

    mesh: jax.sharding.Mesh
    known: set[int] = field(default_factory=lambda: {id(x) for x in jax.live_arrays()})
    peak: int = 0

    def __call__(self, path: Place, shape: tuple[int, ...]) -> Any:
        self.look()
        return placement(self.mesh)(path, shape)

    def look(self) -> None:
        counts = bytes_on_devices(self.known)
        self.peak = max(self.peak, *counts.values(), 0)


def size(variables: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(variables))


@pytest.mark.parametrize("road", ["native", "lowered"])
def test_no_device_holds_more_than_its_share_while_a_model_is_loaded(
    road: Any, model: Path
) -> None:
    watched = Watched(make_mesh(fsdp=8))
    source = load_to_train(str(model), dtype="float32", road=road, shardings=watched)
    watched.look()
    whole = size(source.variables)
    assert whole > 1_000_000
    assert watched.peak <= whole / 8 + SMALL_BYTES


def test_padded_tables_are_split_as_they_are_padded(model: Path) -> None:
    mesh = make_mesh(fsdp=4, tensor=2)
    place = placement(mesh)
    source = load_to_train(str(model), dtype="float32", road="native", shardings=place)
    padded = pad_vocabulary(source, 64, shardings=place)
    plain = pad_vocabulary(dew.load(model), 64)
    table = padded.variables["params"]["embed"]["weight"]
    assert {shard.data.shape for shard in table.addressable_shards} == {(64, 16)}
    expected = plain.variables["params"]["embed"]["weight"]
    np.testing.assert_array_equal(table, expected)


def test_the_flags_place_adapters_and_padding_too(model: Path, tmp_path: Path) -> None:
    flags = Pretrain(model=str(model), data=("x",), out=tmp_path, fsdp=8, pad_vocab=8)
    source = load_to_train(flags.model, road="auto", **flags.loading)
    source = prepare_model(flags, source)
    split = [x for x in jax.tree.leaves(source.variables) if x.size >= 2**12]
    assert len(split) > 20
    for leaf in split:
        assert {shard.data.size for shard in leaf.addressable_shards} == {
            leaf.size // 8
        }


def test_a_state_of_student_teacher_moments_and_average_is_split_from_its_start(
    model: Path,
) -> None:
    mesh = make_mesh(fsdp=8)
    watched = Watched(mesh)
    student, teacher = (
        load_to_train(str(model), dtype="float32", road="native", shardings=watched)
        for _ in range(2)
    )
    whole = size(student.variables)
    average = EMASpec(lambda step: 0.9)
    objective = Distillation(
        student=CausalLM(source=student, seq_len=8, ema=average),
        teacher=ModelTeacher(objective=CausalLM(source=teacher, seq_len=8)),
    )
    batch = {"tokens": np.ones((8, 8), np.int32)}
    run = Trainer(objective, adamw(1e-3), key=jax.random.key(0), mesh=mesh)
    state = run.fit(iter([batch] * 2), steps=1)
    watched.look()
    for leaf in jax.tree.leaves((state.variables, state.optimizer, state.ema)):
        if leaf.size >= 2**12:
            shards = {shard.data.size for shard in leaf.addressable_shards}
            assert shards == {leaf.size // 8}
    # Both as they were loaded; student, teacher, two moments and average in the state.
    assert watched.peak <= 7 * whole / 8 + 7 * SMALL_BYTES
