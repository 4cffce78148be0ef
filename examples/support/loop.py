"""Batches, training loop and recorded figures of the small examples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dew import TrainState
from dew.objectives import Metric, Objective
from dew.training import Callback, Evaluation, Log, Trainer, adamw, cosine
from dew.typing import Batch

Arrays = Mapping[str, np.ndarray]
"""Data set as arrays with one row per example."""


@dataclass
class Watch(Callback):
    """Callback that records the losses and evaluations of a run."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[Mapping[str, float]] = field(default_factory=list)

    def on_log(self, log: Log) -> None:
        self.losses += [commit.loss for commit in log.commits]

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evaluations.append(metrics)


def shuffled_batches(data: Arrays, rows: int, seed: int = 0) -> Iterator[Batch]:
    """Yields batches forever, in a new order each epoch, dropping incomplete ones."""
    draw, count = np.random.default_rng(seed), len(next(iter(data.values())))
    while True:
        order = draw.permutation(count)
        for start in range(0, count - rows + 1, rows):
            yield {name: x[order[start : start + rows]] for name, x in data.items()}


def split_rows(data: Arrays, every: int) -> tuple[Arrays, Arrays]:
    """Splits rows into training rows and each `every`th row, which is held out."""
    count = len(next(iter(data.values())))
    is_held_out = np.arange(count) % every == 0
    training = {name: x[~is_held_out] for name, x in data.items()}
    return training, {name: x[is_held_out] for name, x in data.items()}


def train(
    objective: Objective[Any, Any],
    data: tuple[Arrays, Arrays],
    metrics: Mapping[str, Metric[Any]],
    *,
    steps: int,
    rows: int,
    rate: float,
) -> tuple[TrainState, Watch]:
    """Trains on the first data set and evaluates on the second, before and after."""
    watch, (training, held_out) = Watch(), data
    count = len(next(iter(held_out.values())))

    def held_out_batches() -> Iterator[Batch]:
        for start in range(0, count - rows + 1, rows):
            yield {name: x[start : start + rows] for name, x in held_out.items()}

    trainer = Trainer(
        objective,
        adamw(cosine(rate, steps=steps, warmup=steps // 10)),
        key=jax.random.key(0),
        callbacks=(watch,),
    )
    state = trainer.fit(
        shuffled_batches(training, rows),
        steps=steps,
        evaluations={"held_out": Evaluation(batches=held_out_batches, metrics=metrics)},
        eval_on_start=True,
    )
    return state, watch
