"""Gradient accumulation: statistics of microbatches and the pooled gradient.

The gradient of a window is exactly that of one large batch. For a `Mean` or a scalar,
the numerators' gradients are summed and divided by the pooled mass. Any other
statistics are pooled first, and each microbatch's pullback is replayed under the pooled
cotangent, with the key and the collections of its first evaluation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dew.objectives.base import AnyObjective, Aux, Mean, Objective, Step
from dew.state import TrainState, Window, with_average
from dew.tree import array_text, flatten, merge, replaced, slashed, widen
from dew.typing import Batch, Variables


class Evaluated(NamedTuple):
    """Statistics and reports of one microbatch, and its gradient if it has one.

    `stray` is true where statistics without mass had a total, which was left out.
    """

    stats: Any
    aux: Aux[Any]
    gradient: Any
    stray: Array


def evaluate(
    objective: AnyObjective,
    variables: Variables,
    batch: Batch,
    step: Step,
    *,
    whole_window: bool,
) -> Evaluated:
    """Evaluates the loss of one microbatch and its gradient by `params`.

    The gradient is that of the numerator for a `Mean` or a scalar, which becomes a
    `Mean` of unit mass. For other statistics it is that of the reduced value if the
    microbatch is the `whole_window`, and None if the window has others.
    """

    def loss(params: Any) -> tuple[Any, Aux[Any]]:
        tree = replaced(variables, {"params": params})
        stats, aux = objective.loss(tree, batch, step)
        return _as_mean(objective, stats), aux

    def value(params: Any) -> tuple[Any, tuple[Evaluated, Array]]:
        stats, aux = loss(params)
        linear = _is_linear(objective, stats)
        number, active = (_numerator if linear else objective.reduce_loss)(stats)
        kept = contributing(stats, active)
        return number, (Evaluated(kept.stats, aux, None, kept.stray), active)

    params = variables["params"]
    # The kind of the statistics must be known before the gradient's trace begins.
    shapes, _ = jax.eval_shape(loss, params)
    if not whole_window and not _is_linear(objective, shapes):
        stats, aux = loss(params)
        kept = contributing(stats, objective.reduce_loss(stats)[1])
        return Evaluated(kept.stats, aux, None, kept.stray)
    gradient, (attempt, active) = jax.grad(value, has_aux=True)(params)
    return attempt._replace(gradient=_masked_gradient(gradient, active))


class Contributing(NamedTuple):
    """Statistics as they are added to others, and what became of them.

    `counts` is false where nothing of them is added; `stray` is true where something
    was left out that should not have been there.
    """

    stats: Any
    counts: Array
    stray: Array


def contributing(stats: Any, active: Array) -> Contributing:
    """Leaves out of statistics what has no support, so that it adds nothing.

    The total of every `Mean` without mass becomes 0, whatever an objective gave: zero
    mass declares a zero total. Composite statistics that reduce to no support of their
    own (`active`) still add up, since a window may have it, unless a total was left out
    of them or they are not finite.
    """
    stray: list[Array] = []

    def without_stray_total(part: Any) -> Any:
        if not isinstance(part, Mean):
            return part
        is_empty = jnp.asarray(part.mass) <= 0
        stray.append(jnp.any(is_empty & (jnp.asarray(part.total) != 0)))
        return Mean(jnp.where(is_empty, 0, part.total), part.mass)

    stats = jax.tree.map(
        without_stray_total, stats, is_leaf=lambda part: isinstance(part, Mean)
    )
    if isinstance(stats, Mean):
        return Contributing(stats, stats.mass > 0, stray[0])
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(stats)]
    has_stray = jnp.any(jnp.asarray(stray))
    counts = active | (jnp.all(jnp.stack(finite)) & ~has_stray)
    stats = jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), stats)
    return Contributing(stats, counts, has_stray | ~counts)


def _masked_gradient(gradient: Any, active: Array) -> Any:
    """Widens a gradient to float32 at least; 0 where there is no support.

    Without support a reduction of an objective's own may well be 0 / 0 inside.
    """
    return jax.tree.map(lambda g: jnp.where(active, widen(g), 0), gradient)


def pooled_gradient(objective: AnyObjective, state: TrainState, window: Window) -> Any:
    """Returns the gradient of a window's value by `params`, as of one large batch."""
    if window.replay is not None:
        return _replayed_gradient(objective, state, window)
    if _is_linear(objective, window.stats):
        # value = sum of totals / sum of masses, and no mass depends on `params`: the
        # gradient is the sum of the totals' gradients over the pooled mass.
        mass = jnp.where(window.stats.mass > 0, window.stats.mass, 1)
        return jax.tree.map(lambda g: g / mass.astype(g.dtype), window.gradient)
    # A window of one microbatch: its gradient is already that of the reduced value.
    return window.gradient


def replace_collections(
    objective: AnyObjective, variables: Variables, new: Variables | None
) -> Variables:
    """Returns the variables with the collections in `new` replaced.

    Their nodes stay those of the run: flax returns dicts for what came in frozen.

    Raises:
        ValueError: `new` holds `params`, a held or an unknown collection, or one with
            other leaves, shapes or dtypes; all faults are named.
    """
    if new is None:
        return variables
    faults = []
    for name in new:
        if name == "params" or name in objective.held:
            faults.append(f"{name} is not a loss's to replace")
        elif name not in variables:
            faults.append(
                f"{name} is not a collection of this run: {sorted(variables)}"
            )
        else:
            faults += _differences(name, variables[name], new[name])
    if faults:
        raise ValueError(
            f"{type(objective).__name__} replaces variables wrongly: "
            + "; ".join(faults)
        )
    return replaced(variables, merge({n: variables[n] for n in new}, new))


def _differences(name: str, old: Variables, new: Variables) -> list[str]:
    """Lists the leaves whose presence, shape or dtype a replacement would change."""
    before, after = (
        {p: array_text(x) for p, x in flatten(t).items()} for t in (old, new)
    )
    faults = []
    for path in {**before, **after}:
        was, now = before.get(path, "absent"), after.get(path, "absent")
        if was != now:
            faults.append(f"{name}/{slashed(path)} was {was} and would be {now}")
    return faults


def _as_mean(objective: AnyObjective, stats: Any) -> Any:
    """Makes a plain scalar a `Mean` of unit mass; keeps other statistics."""
    if _has_own_reduction(objective):
        return stats
    if isinstance(stats, Mean):
        return Mean(widen(stats.total), widen(stats.mass))
    number, _ = objective.reduce_loss(stats)
    return Mean(number, jnp.ones_like(number))


def _has_own_reduction(objective: AnyObjective) -> bool:
    return type(objective).reduce_loss is not Objective.reduce_loss


def _is_linear(objective: AnyObjective, stats: Any) -> bool:
    """Whether the gradients of such statistics add up without a replay."""
    return isinstance(stats, Mean) and not _has_own_reduction(objective)


def _numerator(stats: Mean) -> tuple[Array, Array]:
    """Returns the total of a `Mean`, without a gradient where there is no mass."""
    active = stats.mass > 0
    return jnp.where(active, stats.total, 0), active


def _replayed_gradient(
    objective: AnyObjective, state: TrainState, window: Window
) -> Any:
    """Sums the pullbacks of all microbatches under the pooled cotangent.

    With pooled statistics S = sum of s_i and a value r(S), the chain rule gives the
    gradient as the sum of r'(S) · ds_i/dparams: every pullback takes the same r'(S).
    """
    reduce = jax.grad(objective.reduce_loss, has_aux=True, allow_int=True)
    cotangent, active = reduce(window.stats)
    params = state.variables["params"]

    def pull(total: Any, row: Any) -> tuple[Any, None]:
        # Collections as they were on entry: a later microbatch may have replaced them.
        entry = replaced(state.variables, row.collections)
        ema = None if state.ema is None else with_average(entry, state.ema)
        step = Step(row.steps, row.keys, ema)

        def stats_of(params: Any) -> tuple[Any, Array]:
            tree = replaced(entry, {"params": params})
            stats = objective.loss(tree, row.batches, step)[0]
            kept = contributing(stats, objective.reduce_loss(stats)[1])
            return kept.stats, kept.counts

        _, pullback, counts = jax.vjp(stats_of, params, has_aux=True)
        gradient = _masked_gradient(pullback(cotangent)[0], active & counts)
        return jax.tree.map(jnp.add, total, gradient), None

    start = jax.tree.map(lambda p: jnp.zeros_like(widen(p)), params)
    return jax.lax.scan(pull, start, window.replay)[0]
