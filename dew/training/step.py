"""The training step: one attempt at one microbatch, pure in state and batch.

A microbatch whose statistics or gradients are not finite is rejected: only the counts
of attempts change. Accepted ones are summed in a window; when it is full, has support
and is finite, it is committed: one optimizer update, one EMA step, the effects applied
once. A window without support updates nothing, and one that is not finite is dropped.
"""

from dataclasses import dataclass, replace
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dew.objectives.base import AnyObjective, Initializer, Mean, Step
from dew.state import Replay, TrainState, Window
from dew.training.accumulation import (
    Evaluated,
    evaluate,
    pooled_gradient,
    replace_collections,
)
from dew.training.ema import initial_average, next_average
from dew.training.held import held_collections, moved_collections
from dew.tree import replaced, widen
from dew.typing import Batch


@no_type_check
@struct.dataclass
class Report:
    """The outcome of one attempt; its arrays stay on the device until they are read.

    `loss`, `mass` and `grad_norm` are those of the window so far, in which a rejected
    microbatch has no part; without support they are 0. `metrics` include it. `full` is
    true where this microbatch closed the window, `committed` where that updated the
    weights.
    `finite` holds a flag for every leaf that was evaluated, in one array for the
    gradient. `stray` is true where statistics without mass had a total, which is in
    neither loss nor gradient.
    """

    accepted: Bool[Array, ""]
    full: Bool[Array, ""]
    committed: Bool[Array, ""]
    rejected: Int[Array, ""]
    dropped: Int[Array, ""]
    loss: Float[Array, ""]
    mass: Float[Array, ""]
    grad_norm: Float[Array, ""]
    metrics: Any
    finite: Any
    stray: Bool[Array, ""]


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """The step of a run: `attempt` is pure, to be jitted with its state donated.

    `accumulation` microbatches make a window. After `max_rejections` rejected attempts
    or dropped windows in a row no further attempt changes the weights, so that a late
    reader of the reports still has the state of that moment.

    >>> import jax, dew
    >>> from dew.objectives.causal_lm import CausalLM
    >>> from dew.training.optimizers import sgd
    >>> objective = CausalLM(source=dew.load(FOLDER), seq_len=4)
    >>> step = TrainStep(objective=objective, optimizer=sgd(0.1).transform)
    >>> state = jax.jit(step.initial)(objective.initializer, jax.random.key(0))
    >>> batch = {"tokens": jax.numpy.array([[1, 2, 3, 4]])}
    >>> state, report = jax.jit(step.attempt, donate_argnums=0)(state, batch)
    >>> bool(report.committed), int(state.commits)
    (True, 1)
    """

    objective: AnyObjective
    optimizer: optax.GradientTransformation
    accumulation: int = 1
    max_rejections: int = 5

    def __post_init__(self) -> None:
        if min(self.accumulation, self.max_rejections) < 1:
            raise ValueError(
                "accumulation and max_rejections must be >= 1, got "
                f"{self.accumulation} and {self.max_rejections}"
            )

    def initial(
        self, initializer: Initializer, key: Array, batch: Batch | None = None
    ) -> TrainState:
        """Builds the state of a new run; to be jitted, with `initializer` an argument.

        `batch` is an example microbatch (shapes are enough), which sizes the window and
        tells which collections the loss moves; it may be None without accumulation.
        """
        init_key, root = jax.random.split(key)
        variables = initializer(init_key)
        zero = jnp.zeros((), jnp.int32)
        state = TrainState(
            attempts=zero,
            accepted=zero,
            commits=zero,
            rejected=zero,
            dropped=zero,
            key=root,
            variables=variables,
            optimizer=self.optimizer.init({"params": variables["params"]}),
            ema=initial_average(
                self.objective,
                variables,
                held_collections(self.objective, variables, batch),
            ),
            window=None,
        )
        if self.accumulation == 1:
            return state
        return replace(state, window=self._empty_window(state, batch))

    def attempt(self, state: TrainState, batch: Batch) -> tuple[TrainState, Report]:
        """Evaluates one microbatch and returns the next state and a report."""
        key = jax.random.fold_in(state.key, state.attempts)
        step = Step(state.accepted, key, state.averaged)
        evaluated = self._evaluate(state, batch, step)
        # Reports are read steps later. Until then a halted run must not move on.
        halted = jnp.maximum(state.rejected, state.dropped) >= self.max_rejections
        finite = _finite_flags(evaluated)
        flags = [jnp.all(flag) for flag in _deciding_flags(finite)]
        accepted = jnp.all(jnp.stack(flags)) & ~halted
        window = self._extended_window(state, batch, step, evaluated)
        # Both outcomes are computed and one is selected: rejections are rare, and in
        # the common case a branch would skip nothing.
        if_accepted = replace(
            state,
            accepted=state.accepted + 1,
            rejected=jnp.zeros_like(state.rejected),
            variables=replace_collections(
                self.objective, state.variables, evaluated.aux.variables
            ),
        )
        # A report is of the sums that the gradient came from, so not of rejected ones.
        before = _empty(window) if state.window is None else state.window
        told = _select(accepted, window.stats, before.stats)
        if_accepted, report = self._close(if_accepted, window, told, finite)
        if_rejected = replace(state, rejected=state.rejected + jnp.where(halted, 0, 1))
        state = _select(accepted, if_accepted, if_rejected)
        state = replace(state, attempts=state.attempts + 1)
        return state, replace(
            report,
            accepted=accepted,
            grad_norm=jnp.where(accepted, report.grad_norm, 0),
            stray=evaluated.stray,
            full=report.full & accepted,
            committed=report.committed & accepted,
            rejected=state.rejected,
            dropped=state.dropped,
        )

    def _evaluate(self, state: TrainState, batch: Batch, step: Step) -> Evaluated:
        return evaluate(
            self.objective,
            state.variables,
            batch,
            step,
            whole_window=self.accumulation == 1,
        )

    def _empty_window(self, state: TrainState, batch: Batch | None) -> Window:
        if batch is None:
            raise ValueError(
                "accumulation > 1 needs an example batch to size its window"
            )

        def first(state: TrainState, batch: Batch) -> Window:
            step = Step(state.accepted, state.key, state.averaged)
            evaluated = self._evaluate(state, batch, step)
            window = self._extended_window(state, batch, step, evaluated)
            if evaluated.gradient is not None:
                return window
            row = self._row(state, batch, step, evaluated)
            stacked = jax.tree.map(lambda x: jnp.stack([x] * self.accumulation), row)
            return replace(window, replay=stacked)

        shapes = jax.eval_shape(first, state, batch)
        return jax.tree.map(_zeros, shapes)

    def _row(
        self, state: TrainState, batch: Batch, step: Step, evaluated: Evaluated
    ) -> Replay:
        """Returns what a second evaluation of this microbatch needs."""
        moved = moved_collections(self.objective, state.variables, evaluated.aux)
        collections = {k: v for k, v in state.variables.items() if k in moved}
        return Replay(batch, step.key, step.step, collections)

    def _extended_window(
        self, state: TrainState, batch: Batch, step: Step, evaluated: Evaluated
    ) -> Window:
        """Returns the window with this microbatch added to it."""
        entry = Window(
            count=jnp.ones((), jnp.int32),
            stats=evaluated.stats,
            metrics={name: _as_mean(m) for name, m in evaluated.aux.metrics.items()},
            gradient=evaluated.gradient,
            effects=evaluated.aux.effects,
            qk_stats=_row_maxima(evaluated.aux.qk_stats),
            replay=None,
        )
        window = state.window
        if window is None:
            return entry
        replay = window.replay
        if replay is not None:
            row = self._row(state, batch, step, evaluated)
            replay = jax.tree.map(lambda to, x: to.at[window.count].set(x), replay, row)
        sums = jax.tree.map(jnp.add, _additive(window), _additive(entry))

        def highest(old: Array, new: Array) -> Array:
            # An empty window holds zeros, which may exceed the true maxima.
            return jnp.where(window.count == 0, new, jnp.maximum(old, new))

        return Window(
            count=window.count + 1,
            **sums,
            qk_stats=jax.tree.map(highest, window.qk_stats, entry.qk_stats),
            replay=replay,
        )

    def _close(
        self, state: TrainState, window: Window, told: Any, finite: Any
    ) -> tuple[TrainState, Report]:
        """Commits the window if it is full; otherwise stores it in the state.

        `told` are the statistics to report: the window's, if they were accepted.
        """
        full = window.count >= self.accumulation
        value, active = self.objective.reduce_loss(told)
        value = jnp.where(active, value, 0)

        def commit() -> tuple[TrainState, Array, Array]:
            return self._commit(state, window, value, active)

        def wait() -> tuple[TrainState, Array, Array]:
            no_norm = jnp.zeros((), jnp.float32)
            return replace(state, window=window), no_norm, jnp.asarray(False)

        # A branch, not a select: an open window needs no update, and a replay costs as
        # much as all its microbatches did. Without accumulation every window is full.
        if self.accumulation == 1:
            new, norm, committed = commit()
        else:
            new, norm, committed = jax.lax.cond(full, commit, wait)
        report = Report(
            accepted=jnp.asarray(True),
            full=full,
            committed=committed,
            rejected=new.rejected,
            dropped=new.dropped,
            loss=value,
            mass=told.mass if isinstance(told, Mean) else jnp.ones(()),
            grad_norm=norm,
            metrics={name: _average(m) for name, m in window.metrics.items()},
            finite=finite,
            stray=jnp.asarray(False),
        )
        return new, report

    def _commit(
        self, state: TrainState, window: Window, value: Array, active: Array
    ) -> tuple[TrainState, Array, Array]:
        """Applies the optimizer if the window has support and is finite; empties it.

        Returns the state, the gradient's norm, and whether the weights were updated.
        """
        gradient = pooled_gradient(self.objective, state, window)
        norm = optax.tree.norm(gradient).astype(jnp.float32)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        good = active & finite
        params = {"params": state.variables["params"]}
        updates, optimizer = optax.with_extra_args_support(self.optimizer).update(
            {"params": gradient}, state.optimizer, params, qk_stats=window.qk_stats
        )
        updated: Any = optax.apply_updates(params, updates)
        variables = replaced(state.variables, updated)
        if window.effects is not None:
            effects = self.objective.apply_effects(variables, window.effects)
            variables = replace_collections(self.objective, variables, effects)
        if_good = replace(
            state,
            commits=state.commits + 1,
            dropped=jnp.zeros_like(state.dropped),
            variables=variables,
            optimizer=optimizer,
            ema=next_average(self.objective, state, variables),
        )
        # A window without support is neither: it counts as neither commit nor drop.
        bad = active & ~finite
        if_bad = replace(state, dropped=state.dropped + jnp.where(bad, 1, 0))
        closed = _select(good, if_good, if_bad)
        if state.window is not None:
            # Rows of a replay buffer are overwritten one by one; they need no clearing.
            empty = replace(_empty(window), replay=window.replay)
            closed = replace(closed, window=empty)
        return closed, norm, good


def _finite_flags(evaluated: Evaluated) -> dict[str, Any]:
    """Flags every leaf as finite or not, by the part that it belongs to."""

    def flags(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)), tree)

    gradient = jax.tree.leaves(flags(evaluated.gradient))
    return {
        "statistics": flags(evaluated.stats),
        "gradient": jnp.stack(gradient) if gradient else jnp.ones((1,), bool),
        "variables": flags(evaluated.aux.variables),
        "effects": flags(evaluated.aux.effects),
        "metrics": flags(dict(evaluated.aux.metrics)),
    }


def _deciding_flags(finite: dict[str, Any]) -> list[Array]:
    """Returns the flags that decide on a rejection: all but the metrics'."""
    return jax.tree.leaves({k: v for k, v in finite.items() if k != "metrics"})


def _empty(window: Window) -> Window:
    """Returns a window of the same form in which nothing was added up."""
    return jax.tree.map(jnp.zeros_like, replace(window, replay=None))


def _as_mean(metric: Any) -> Mean:
    if isinstance(metric, Mean):
        mass = widen(metric.mass)
        return Mean(jnp.where(mass > 0, widen(metric.total), 0), mass)
    number = jnp.asarray(metric, jnp.float32)
    return Mean(number, jnp.ones_like(number))


def _average(metric: Mean) -> Array:
    """Returns the metric's value, NaN where nothing was measured."""
    mass = jnp.where(metric.mass > 0, metric.mass, 1)
    return jnp.where(metric.mass > 0, metric.total / mass, jnp.nan)


def _row_maxima(qk_stats: Any) -> Any:
    """Reduces per-head maxima over the rows to [1, heads], so that windows pool."""

    def over_rows(leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        return jnp.max(leaf, axis=0, keepdims=True) if leaf.ndim == 2 else leaf

    return jax.tree.map(over_rows, qk_stats)


def _zeros(leaf: Any) -> Array:
    """Returns zeros of a shape; for random keys, copies of key 0."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)


def _additive(window: Window) -> dict[str, Any]:
    """Returns the parts of a window that add up over microbatches."""
    return {
        "stats": window.stats,
        "metrics": window.metrics,
        "gradient": window.gradient,
        "effects": window.effects,
    }


def _select(condition: Array, yes: Any, no: Any) -> Any:
    """Selects `yes` or `no` leaf by leaf; a leaf that both share needs no select."""
    return jax.tree.map(
        lambda a, b: a if a is b else jnp.where(condition, a, b), yes, no
    )
