"""What the small examples share: batches of arrays, and a run with its figures."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dew.objectives.base import Metric, Objective
from dew.state import TrainState
from dew.training.callbacks import Callback
from dew.training.evaluation import Evaluation
from dew.training.logs import Log
from dew.training.optimizers import adamw
from dew.training.schedules import cosine
from dew.training.trainer import Trainer
from dew.typing import Batch

Arrays = Mapping[str, np.ndarray]
"""A whole data set: every array has one row an example."""


@dataclass
class Watch(Callback):
    """Keeps the losses and the evaluations of a run."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[Mapping[str, float]] = field(default_factory=list)

    def on_log(self, log: Log) -> None:
        self.losses += [commit.loss for commit in log.commits]

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evaluations.append(metrics)


def shuffled(data: Arrays, rows: int, seed: int = 0) -> Iterator[Batch]:
    """Batches without end, in a new order each epoch; a last short one is left out."""
    draw, count = np.random.default_rng(seed), len(next(iter(data.values())))
    while True:
        order = draw.permutation(count)
        for start in range(0, count - rows + 1, rows):
            yield {name: x[order[start : start + rows]] for name, x in data.items()}


def parts(data: Arrays, every: int) -> tuple[Arrays, Arrays]:
    """Splits the rows: what is trained on, and each `every`th, which is held out."""
    count = len(next(iter(data.values())))
    held = np.arange(count) % every == 0
    seen = {name: x[~held] for name, x in data.items()}
    return seen, {name: x[held] for name, x in data.items()}


def train(
    objective: Objective[Any, Any],
    data: tuple[Arrays, Arrays],
    metrics: Mapping[str, Metric[Any]],
    *,
    steps: int,
    rows: int,
    rate: float,
) -> tuple[TrainState, Watch]:
    """Trains on the first part, and measures on the second before and after."""
    watch, (seen, held_out) = Watch(), data
    count = len(next(iter(held_out.values())))

    def every() -> Iterator[Batch]:
        for start in range(0, count - rows + 1, rows):
            yield {name: x[start : start + rows] for name, x in held_out.items()}

    trainer = Trainer(
        objective,
        adamw(cosine(rate, steps=steps, warmup=steps // 10)),
        key=jax.random.key(0),
        callbacks=(watch,),
    )
    state = trainer.fit(
        shuffled(seen, rows),
        steps=steps,
        evaluations={"held_out": Evaluation(batches=every, metrics=metrics)},
        eval_on_start=True,
    )
    return state, watch
