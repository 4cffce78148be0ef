"""Exponential moving average of a run's variables.

The arithmetic is float32 or wider, whatever the leaf: at a decay of 0.999 an average in
bfloat16 would not move at all, since a thousandth of a step is less than its rounding.
"""

from collections.abc import Collection

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from dew.objectives.base import AnyObjective, EMASpec
from dew.state import TrainState
from dew.tree import flatten, map_leaves, select, widen
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

    averaged = select(variables, is_averaged)
    return map_leaves(lambda _, leaf: _stored(spec, leaf), averaged)


def next_average(
    objective: AnyObjective, state: TrainState, variables: Variables
) -> Variables | None:
    """Moves the average of a state one commit towards new variables.

    Leaves that are no fractions, such as counts and random keys, are copied from the
    new variables. None where the run has no EMA.
    """
    spec = objective.ema
    if state.ema is None or spec is None:
        return None
    decay = spec.decay(state.commits)
    live = flatten(variables)

    def moved_average(path: Path, old: Array) -> Array:
        new = live[path]
        if not jnp.issubdtype(old.dtype, jnp.inexact):
            return new
        return _between(widen(old), widen(new), decay).astype(old.dtype)

    return map_leaves(moved_average, state.ema)


def _stored(spec: EMASpec, leaf: Array) -> Array:
    """Returns the leaf in the dtype that its average is stored in."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return widen(leaf) if spec.dtype is None else leaf.astype(spec.dtype)


def _between(old: Array, new: Array, decay: ArrayLike) -> Array:
    """Returns decay · old + (1 - decay) · new, exactly `new` at 0 and `old` at 1."""
    wide = jnp.promote_types(old.dtype, new.dtype)
    old, new = old.astype(wide), new.astype(wide)
    # From the nearer end: constant weights are then a fixed point, and a decay that is
    # a Python number is subtracted from 1 before it is rounded.
    is_old_nearer = jnp.asarray(decay) > 0.5
    gain, decay = (jnp.asarray(part, wide) for part in (1 - decay, decay))
    step = new - old
    return jnp.where(is_old_nearer, old + gain * step, new - decay * step)
