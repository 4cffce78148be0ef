"""Batches are trees: arrays and numbers reach the loss, all else stays on the host."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.batch import arrays_of, host_values, with_arrays
from dew.objectives.base import Aux, Mean, Step
from dew.training.evaluation import Evaluation
from dew.training.sharding import make_mesh, place_batch
from dew.training.trainer import Trainer
from tests.support.objectives import MOMENTUM, Composite, Moments, Toy, errors
from tests.support.runs import Losses
from tests.support.tolerances import RTOL

ROWS = 8


@dataclass
class Record:
    """A host value that is no PyTree."""

    name: str


def rows_of(seed: int, rows: int = ROWS) -> dict[str, Any]:
    """A tree of everything that a batch may hold."""
    draw = np.random.default_rng(seed)
    return {
        "x": draw.normal(size=(rows, 3)).astype(np.float32),
        "target": {"y": draw.normal(size=rows).astype(np.float32), "unit": "metres"},
        "weights": [np.ones(rows, np.float32), (np.float32(2), 0.5)],
        "count": rows + seed,
        "zero": np.zeros((), np.int32),
        "flag": True,
        "path": Path(f"{seed}.txt"),
        "texts": [f"text {i}" for i in range(rows)],
        "records": [{"name": "a", "at": 3}, Record("b")],
        "names": np.asarray(["a"] * rows, object),
        "blob": b"bytes",
        "nothing": None,
    }


HOST = "target/unit path texts records names blob nothing".split()
seen: list[Any] = []


def loss(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
    assert "path" not in batch
    assert set(batch["target"]) == {"y"}
    weights, (twice, half) = batch["weights"]
    assert (twice.shape, half.dtype, batch["count"].dtype) == ((), "float32", "int32")
    seen.append("compiled")
    flat = {"x": batch["x"], "y": batch["target"]["y"]}
    stats = Mean.of(errors(params, flat) ** 2, weights * twice * half)
    return stats, Aux(metrics={"count": batch["count"].astype(jnp.float32)})


def as_sums(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
    stats, _ = loss(params, batch, step)
    return Moments(stats.mass, stats.total, stats.total**2), Aux()


class Shown(Toy):
    """Evaluates to the errors beside the host's values of the batch."""

    artifact = dict

    def evaluate(self, params: Any, batch: Any, step: Step) -> Any:
        seen.append({n: batch[n] for n in ("path", "texts", "records", "target")})
        assert isinstance(batch["count"], jax.Array | np.ndarray)
        flat = {"x": batch["x"], "y": batch["target"]["y"]}
        return {"errors": errors(params, flat)}

    def preview(
        self, params: Any, batch: Any, step: Step, *, scored: Any = None
    ) -> Any:
        return batch["path"]


@pytest.fixture(autouse=True)
def clean() -> None:
    seen.clear()


def fit(
    objective: Any = None, count: int = 4, data: Any = None, **settings: Any
) -> Any:
    losses = Losses()
    trainer = Trainer(
        Toy(of=loss) if objective is None else objective,
        MOMENTUM,
        key=jax.random.key(0),
        callbacks=[losses],
        **settings,
    )
    data = (rows_of(i) for i in range(99)) if data is None else iter(data)
    trainer.fit(data, steps=count, log_every=1)
    return losses


def test_the_loss_sees_arrays_and_numbers_and_is_compiled_once() -> None:
    losses = fit()
    # Numbers that differ from batch to batch are arguments, not constants.
    assert [log.metrics["count"] for log in losses.logs] == [8, 9, 10, 11]
    traces = len(seen)
    seen.clear()
    fit(count=1)
    assert traces <= len(seen) + 1


def test_what_stays_on_the_host_is_named_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit()
    told = capsys.readouterr().err
    assert told.count("stays on the host") == 1
    for name in HOST:
        assert name in told, name


def test_a_tree_accumulates_and_replays_as_one_batch() -> None:
    mesh = make_mesh(fsdp=4, devices=jax.devices()[:4])
    parts = [rows_of(0), rows_of(1)]
    flat = [fit(Toy(of=loss), 1, parts, accumulation=2)]
    flat += [fit(Toy(of=loss), 1, parts, accumulation=2, mesh=mesh)]
    assert flat[1].losses == pytest.approx(flat[0].losses, rel=RTOL["float32"])
    sums = Composite(of=as_sums)
    pooled = [fit(sums, 1, parts, accumulation=2, **on) for on in ({}, {"mesh": mesh})]
    assert pooled[1].losses == pytest.approx(pooled[0].losses, rel=RTOL["float32"])


@pytest.mark.parametrize("mesh", [False, True], ids=["one device", "mesh"])
def test_evaluate_and_preview_get_the_host_values(mesh: bool) -> None:
    shown: list[Any] = []

    class Previews(Losses):
        def on_preview(self, step: int, name: str, preview: Any) -> None:
            shown.append(preview)

    trainer = Trainer(
        Shown(of=loss),
        MOMENTUM,
        key=jax.random.key(0),
        callbacks=[Previews()],
        mesh=make_mesh(fsdp=4, devices=jax.devices()[:4]) if mesh else None,
    )
    held_out = {"held_out": Evaluation(batches=lambda: [rows_of(7)], metrics={})}
    trainer.fit(iter([rows_of(0)]), steps=1, evaluations=held_out)
    (got,) = [entry for entry in seen if entry != "compiled"]
    want = rows_of(7)
    assert got["path"] == want["path"] == shown[0]
    assert (got["texts"], got["records"]) == (want["texts"], want["records"])
    assert got["target"]["unit"] == "metres"


def test_placing_splits_rows_and_replicates_numbers() -> None:
    mesh = make_mesh(fsdp=4, devices=jax.devices()[:4])
    placed = place_batch(rows_of(3) | {"key": jax.random.key(5)}, mesh)
    assert {s.data.shape for s in placed["x"].addressable_shards} == {(2, 3)}
    assert placed["count"].is_fully_replicated
    assert (int(placed["count"]), placed["path"]) == (11, Path("3.txt"))
    assert placed["weights"][1][1].dtype == jnp.float32
    same = jax.random.key_data(placed["key"]) == jax.random.key_data(jax.random.key(5))
    assert bool(same.all())


def test_numbers_have_the_dtypes_of_their_kinds() -> None:
    arrays = arrays_of(
        {"a": 1, "b": 2.5, "c": False, "d": np.float16(1), "e": [3, 4.0]}
    )
    kinds = [str(leaf.dtype) for leaf in jax.tree.leaves(arrays)]
    assert kinds == ["int32", "float32", "bool", "float16", "int32", "float32"]
    with pytest.raises(OverflowError, match="a/b of the batch is 1099511627776, which"):
        arrays_of({"a": {"b": 2**40}})


def test_both_parts_make_the_batch_again() -> None:
    batch = rows_of(0)
    arrays, host = arrays_of(batch), host_values(batch)
    assert {"/".join(path) for path in host} == set(HOST)
    again = with_arrays(batch, arrays)
    assert set(again) == set(batch)
    assert again["records"] is batch["records"]
    assert again["x"] is batch["x"]


FAULTS = {
    "missing": (
        {"x": "a path"},
        r"lacks x \(it stays on the host\).*it has .*target/y",
    ),
    "shape": (
        {"x": np.zeros((8, 5), np.float32)},
        r"x of the batch is float32\[8, 5\]",
    ),
    "dtype": ({"x": np.zeros((8, 3), np.int32)}, r"is int32\[8, 3\], but .*float32\["),
    "rows": ({"more": {"z": np.zeros(6)}}, r"as many rows: .*x has 8.*more/z has 6"),
    "all": (
        {"x": np.zeros((6, 5), np.float32)},
        r"x of the batch is float32\[6, 5\].*; arrays of one batch must have as many",
    ),
}


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_the_first_batch_is_checked_by_name(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(data=[{**rows_of(0), **change}])


LATER = {
    "new": ({"z": np.zeros(8)}, r"z was absent, is float64\[8\]"),
    "nested": (
        {"target": {"y": np.zeros(7, np.float32)}},
        r"target/y was float32\[8\], is float32\[7\]",
    ),
    "gone": ({"target": {"unit": "feet"}}, r"target/y was float32\[8\], is absent"),
    "type": ({"count": 1.5}, r"count was int32\[\], is float32\[\]"),
    "kind": (
        {"weights": (np.ones(8, np.float32), (np.float32(2), 0.5))},
        "lists or tuples of other kinds",
    ),
}


@pytest.mark.parametrize(("change", "message"), LATER.values(), ids=LATER)
def test_a_later_batch_of_another_form_is_named(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(data=[rows_of(0), {**rows_of(1), **change}])
