"""Exponential moving average of a run's variables."""

from collections.abc import Collection

import jax.numpy as jnp
from jaxtyping import Array

from dew.objectives.base import AnyObjective
from dew.state import TrainState
from dew.tree import flatten, select, unflatten
from dew.typing import Path, Variables


def initial_average(
    objective: AnyObjective, variables: Variables, held: Collection[str]
) -> Variables | None:
    """Selects the leaves to average, at their initial values; None without an EMA.

    Leaves of the collections `held` never move, so their average would be a second
    copy: they are left out whatever `EMASpec.select` accepts.
    """
    spec = objective.ema
    if spec is None:
        return None

    def is_averaged(path: Path) -> bool:
        return path[0] not in held and spec.select(path)

    return select(variables, is_averaged)


def next_average(
    objective: AnyObjective, state: TrainState, variables: Variables
) -> Variables | None:
    """Moves the average of a state one commit towards new variables.

    Integer leaves are copied from the new variables. None where the run has no EMA.
    """
    if state.ema is None or objective.ema is None:
        return None
    decay = objective.ema.decay(state.commits)
    live = flatten(variables)

    def moved_average(old: Array, new: Array) -> Array:
        if not jnp.issubdtype(old.dtype, jnp.inexact):
            return new
        rate = jnp.asarray(decay, old.dtype)
        return rate * old + (1 - rate) * new

    leaves = flatten(state.ema).items()
    return unflatten({path: moved_average(old, live[path]) for path, old in leaves})
