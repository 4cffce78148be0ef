"""Statistics of microbatches, their gradients, and how a window pools them.

The gradient of a window is exactly that of one large batch. For a `Mean` or a scalar,
the numerators' gradients are summed and divided by the pooled mass. Any other
statistics are pooled first, and each microbatch's pullback is replayed under the pooled
cotangent, with the key and the collections that it was first evaluated with.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dew.objectives.base import Aux, Mean, Objective, Step
from dew.state import TrainState, Window
from dew.tree import flatten, merge, slashed, widen
from dew.typing import Batch, Variables


class Evaluated(NamedTuple):
    """One microbatch evaluated: statistics, reports, and its gradient if it has one."""

    stats: Any
    aux: Aux[Any]
    gradient: Any


def evaluate(
    objective: Objective[Any, Any],
    variables: Variables,
    batch: Batch,
    step: Step,
    *,
    alone: bool,
) -> Evaluated:
    """Evaluates one microbatch.

    The gradient is that of the numerator for a `Mean` or a scalar, which becomes a
    `Mean` of unit mass. For other statistics it is that of the reduced value if the
    microbatch is a window `alone`, and None if it must wait for the others.
    """

    def loss(params: Any) -> tuple[Any, Aux[Any]]:
        stats, aux = objective.loss({**variables, "params": params}, batch, step)
        return _as_mean(objective, stats), aux

    def value(params: Any) -> tuple[Any, tuple[Evaluated, Array]]:
        stats, aux = loss(params)
        linear = _is_linear(objective, stats)
        number, active = (_numerator if linear else objective.reduce_loss)(stats)
        return number, (Evaluated(stats, aux, None), active)

    params = variables["params"]
    shapes, _ = jax.eval_shape(loss, params)
    if not alone and not _is_linear(objective, shapes):
        return Evaluated(*loss(params), None)
    gradient, (attempt, active) = jax.grad(value, has_aux=True)(params)
    return attempt._replace(gradient=_supported(gradient, active))


def _supported(gradient: Any, active: Array) -> Any:
    """The gradient in float32 or wider, and 0 where there is no support.

    Without support a reduction of an objective's own may well be 0 / 0 inside.
    """
    return jax.tree.map(lambda g: jnp.where(active, widen(g), 0), gradient)


def pooled_gradient(
    objective: Objective[Any, Any], state: TrainState, window: Window
) -> Any:
    """The gradient of the window's value by `params`, as of one large batch."""
    if window.replay is not None:
        return _replayed(objective, state, window)
    if _is_linear(objective, window.stats):
        mass = jnp.where(window.stats.mass > 0, window.stats.mass, 1)
        return jax.tree.map(lambda g: g / mass.astype(g.dtype), window.gradient)
    return window.gradient


def replaced(
    objective: Objective[Any, Any], variables: Variables, new: Variables | None
) -> Variables:
    """The variables with whole collections replaced.

    Raises:
        ValueError: a replacement holds `params`, a held or an unknown collection, or
            another tree; all faults are named.
    """
    if new is None:
        return variables
    faults = []
    for name in new:
        if name == "params" or name in objective.held:
            faults.append(f"{name} is not a loss's to replace")
        elif name not in variables:
            faults.append(f"{name} is no collection of this run: {sorted(variables)}")
        else:
            faults += _differences(name, variables[name], new[name])
    if faults:
        raise ValueError(
            f"{type(objective).__name__} replaces variables wrongly: "
            + "; ".join(faults)
        )
    return {**variables, **new}


def _differences(name: str, old: Variables, new: Variables) -> list[str]:
    """What of a collection's replacement is not as the collection itself."""
    before, after = ({p: _kind(x) for p, x in flatten(t).items()} for t in (old, new))
    faults = []
    for path in {**before, **after}:
        was, now = before.get(path, "absent"), after.get(path, "absent")
        if was != now:
            faults.append(f"{name}/{slashed(path)} was {was} and would be {now}")
    return faults


def _kind(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"


def _as_mean(objective: Objective[Any, Any], stats: Any) -> Any:
    """A plain scalar as a term of unit mass; anything else as it is."""
    if _has_own_reduction(objective):
        return stats
    if isinstance(stats, Mean):
        return Mean(widen(stats.total), widen(stats.mass))
    number, _ = objective.reduce_loss(stats)
    return Mean(number, jnp.ones_like(number))


def _has_own_reduction(objective: Objective[Any, Any]) -> bool:
    return type(objective).reduce_loss is not Objective.reduce_loss


def _is_linear(objective: Objective[Any, Any], stats: Any) -> bool:
    """Whether gradients of such statistics add up without a replay."""
    return isinstance(stats, Mean) and not _has_own_reduction(objective)


def _numerator(stats: Mean) -> tuple[Array, Array]:
    """The sum of a `Mean`, which has no gradient where there is no mass."""
    active = stats.mass > 0
    return jnp.where(active, stats.total, 0), active


def _replayed(objective: Objective[Any, Any], state: TrainState, window: Window) -> Any:
    """The sum of the pullbacks of all microbatches under the pooled cotangent."""
    reduce = jax.grad(objective.reduce_loss, has_aux=True, allow_int=True)
    cotangent, active = reduce(window.stats)
    params = state.variables["params"]

    def pull(total: Any, row: Any) -> tuple[Any, None]:
        entry = {**state.variables, **row.collections}
        ema = None if state.ema is None else merge(entry, state.ema)
        step = Step(row.steps, row.keys, ema)

        def stats_of(params: Any) -> Any:
            return objective.loss({**entry, "params": params}, row.batches, step)[0]

        _, pullback = jax.vjp(stats_of, params)
        (gradient,) = pullback(cotangent)
        return jax.tree.map(jnp.add, total, _supported(gradient, active)), None

    start = jax.tree.map(lambda p: jnp.zeros_like(widen(p)), params)
    return jax.lax.scan(pull, start, window.replay)[0]
