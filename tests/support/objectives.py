"""Objectives small enough to work out by hand, one for each kind of statistics."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from dew.objectives.base import Aux, EMASpec, Mean, Objective, Step
from dew.state import TrainState
from dew.training.step import TrainStep

MOMENTUM = optax.sgd(0.1, momentum=0.9)


@struct.dataclass
class Moments:
    """Sums over records from which a variance follows only once all are in."""

    count: Any
    first: Any
    second: Any


def errors(params: Any, batch: Any) -> Any:
    return jnp.sum(batch["x"] * params["params"]["w"][None], axis=1) - batch["y"]


def as_mean(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
    return Mean.of(errors(params, batch) ** 2, batch["weight"]), Aux()


def as_scalar(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
    return jnp.mean(errors(params, batch) ** 2), Aux()


def as_moments(params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
    error, weight = errors(params, batch), batch["weight"]
    sums = (jnp.sum(weight * error**power) for power in (0, 1, 2))
    return Moments(*sums), Aux()


def variance(stats: Moments) -> tuple[Any, Any]:
    """The variance; NaN (0 / 0) without records, as in a careless reduction."""
    mean = stats.first / stats.count
    return stats.second / stats.count - mean**2, stats.count > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Toy(Objective[Any, Any]):
    """Linear regression on three inputs, with the loss function as a field."""

    of: Callable[[Any, Any, Step], tuple[Any, Aux[Any]]] = as_mean
    start: Any = None
    ema: EMASpec | None = None

    @property
    def inputs(self) -> Any:
        return {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}

    def held_variables(self) -> Any:
        return self.start

    def init(self, key: Any, variables: Any = None) -> Any:
        variables = self.held_variables() if variables is None else variables
        return variables or {"params": {"w": jnp.asarray([0.5, -1.0, 2.0])}}

    def loss(self, params: Any, batch: Any, step: Step) -> tuple[Any, Aux[Any]]:
        return self.of(params, batch, step)


class Composite(Toy):
    """The variance of the errors, with their moments as statistics."""

    def reduce_loss(self, stats: Moments) -> tuple[Any, Any]:
        return variance(stats)


class Counting(Toy):
    """Adds a window's effects to the collection `seen`."""

    def apply_effects(self, variables: Any, effects: Any) -> Any:
        return {"seen": jax.tree.map(jnp.add, variables["seen"], effects)}


def microbatch(seed: int, weights: Any = (1, 1, 1, 1)) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(len(weights), 3))
    y = draw.normal(size=len(weights))
    leaves = {"x": x, "y": y, "weight": np.asarray(weights)}
    return {name: jnp.asarray(leaf, jnp.float32) for name, leaf in leaves.items()}


def joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *batches)


class Run:
    """A step with its state, attempted microbatch by microbatch."""

    def __init__(
        self,
        objective: Objective[Any, Any],
        *,
        optimizer: Any = None,
        accumulation: int = 1,
        example: Any = None,
        max_rejections: int = 5,
    ) -> None:
        step = TrainStep(
            objective=objective,
            optimizer=optimizer or optax.sgd(0.1),
            accumulation=accumulation,
            max_rejections=max_rejections,
        )
        self.objective = objective
        batch = microbatch(0) if example is None else example
        start = jax.jit(partial(step.initial, batch=batch))
        self.state: TrainState = start(objective.initializer, jax.random.key(7))
        self._attempt = jax.jit(step.attempt)

    def feed(self, *batches: Any) -> Any:
        """Attempts each batch in turn and returns the last report."""
        report = None
        for batch in batches:
            self.state, report = self._attempt(self.state, batch)
        return report
