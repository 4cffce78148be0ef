"""One attempt at one microbatch, as a pure function of state and batch.

A microbatch whose statistics or gradients are not finite is rejected: nothing of the
state moves but the count of attempts. Accepted ones gather in a window; when it is
full, has support and is finite, it is committed: one optimizer update, one EMA step,
the effects applied once. A window without support moves nothing, and one that is not
finite is dropped.
"""

from dataclasses import dataclass, replace
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dew.objectives.base import Initializer, Mean, Objective, Step
from dew.state import Replay, TrainState, Window
from dew.training.accumulation import Evaluated, evaluate, pooled_gradient, replaced
from dew.training.ema import initial_average, next_average
from dew.tree import widen
from dew.typing import Batch


@no_type_check
@struct.dataclass
class Report:
    """What one attempt came to; arrays stay on the device until somebody reads them.

    `loss`, `mass`, `grad_norm` and `metrics` are those of the window so far; where
    `full`, it has just been closed, and `committed` says whether weights moved.
    `finite` flags every leaf of what was evaluated, in one array for the gradient.
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


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """The step of a run: `attempt` is pure, and jitted with its state donated.

    `accumulation` microbatches make a window. After `max_rejections` rejected attempts
    or dropped windows in a row nothing moves any more, so that whoever reads the
    reports late still finds the state as it was.
    """

    objective: Objective[Any, Any]
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
        """Builds the state of a new run; jit it, with the held arrays as arguments.

        `batch` is an example microbatch (shapes are enough), which sizes the window;
        it may be None without accumulation.
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
            ema=initial_average(self.objective, variables),
            window=None,
        )
        if self.accumulation == 1:
            return state
        return replace(state, window=self._empty_window(state, batch))

    def attempt(self, state: TrainState, batch: Batch) -> tuple[TrainState, Report]:
        """Evaluates one microbatch and moves the state as far as that allows."""
        key = jax.random.fold_in(state.key, state.attempts)
        step = Step(state.accepted, key, state.averaged)
        tried = self._evaluate(state, batch, step)
        halted = jnp.maximum(state.rejected, state.dropped) >= self.max_rejections
        finite = _finite(tried)
        accepted = jnp.all(jnp.stack([jnp.all(x) for x in _judged(finite)])) & ~halted
        window = self._gathered(state, batch, step, tried)
        entered = replace(
            state,
            accepted=state.accepted + 1,
            rejected=jnp.zeros_like(state.rejected),
            variables=replaced(self.objective, state.variables, tried.aux.variables),
        )
        moved, report = self._close(entered, window, finite)
        turned_down = replace(state, rejected=state.rejected + jnp.where(halted, 0, 1))
        state = _where(accepted, moved, turned_down)
        state = replace(state, attempts=state.attempts + 1)
        return state, replace(
            report,
            accepted=accepted,
            full=report.full & accepted,
            committed=report.committed & accepted,
            rejected=state.rejected,
            dropped=state.dropped,
        )

    def _evaluate(self, state: TrainState, batch: Batch, step: Step) -> Evaluated:
        alone = self.accumulation == 1
        return evaluate(self.objective, state.variables, batch, step, alone=alone)

    def _empty_window(self, state: TrainState, batch: Batch | None) -> Window:
        if batch is None:
            raise ValueError(
                "accumulation > 1 needs an example batch to size its window"
            )

        def first(state: TrainState, batch: Batch) -> Window:
            step = Step(state.accepted, state.key, state.averaged)
            tried = self._evaluate(state, batch, step)
            window = self._gathered(state, batch, step, tried)
            if tried.gradient is not None:
                return window
            row = self._row(state, batch, step)
            stacked = jax.tree.map(lambda x: jnp.stack([x] * self.accumulation), row)
            return replace(window, replay=stacked)

        shapes = jax.eval_shape(first, state, batch)
        return jax.tree.map(_zeros, shapes)

    def _row(self, state: TrainState, batch: Batch, step: Step) -> Replay:
        """What it takes to evaluate this microbatch again."""
        held = ("params", *self.objective.held)
        collections = {k: v for k, v in state.variables.items() if k not in held}
        return Replay(dict(batch), step.key, step.step, collections)

    def _gathered(
        self, state: TrainState, batch: Batch, step: Step, tried: Evaluated
    ) -> Window:
        """The window with this microbatch in it."""
        entry = Window(
            count=jnp.ones((), jnp.int32),
            stats=tried.stats,
            metrics={name: _as_mean(m) for name, m in tried.aux.metrics.items()},
            gradient=tried.gradient,
            effects=tried.aux.effects,
            qk_stats=_row_maxima(tried.aux.qk_stats),
            replay=None,
        )
        kept = state.window
        if kept is None:
            return entry
        replay = kept.replay
        if replay is not None:
            row = self._row(state, batch, step)
            replay = jax.tree.map(lambda to, x: to.at[kept.count].set(x), replay, row)
        sums = jax.tree.map(jnp.add, _additive(kept), _additive(entry))

        def highest(old: Array, new: Array) -> Array:
            # An empty window holds zeros, which are no maxima.
            return jnp.where(kept.count == 0, new, jnp.maximum(old, new))

        return Window(
            count=kept.count + 1,
            **sums,
            qk_stats=jax.tree.map(highest, kept.qk_stats, entry.qk_stats),
            replay=replay,
        )

    def _close(
        self, state: TrainState, window: Window, finite: Any
    ) -> tuple[TrainState, Report]:
        """Commits the window if it is full; otherwise keeps it open."""
        full = window.count >= self.accumulation
        value, active = self.objective.reduce_loss(window.stats)

        def commit() -> tuple[TrainState, Array, Array]:
            return self._commit(state, window, value, active)

        def wait() -> tuple[TrainState, Array, Array]:
            no_norm = jnp.zeros((), jnp.float32)
            return replace(state, window=window), no_norm, jnp.asarray(False)

        alone = self.accumulation == 1
        moved, norm, done = commit() if alone else jax.lax.cond(full, commit, wait)
        is_mean = isinstance(window.stats, Mean)
        report = Report(
            accepted=jnp.asarray(True),
            full=full,
            committed=done,
            rejected=moved.rejected,
            dropped=moved.dropped,
            loss=value,
            mass=window.stats.mass if is_mean else jnp.ones(()),
            grad_norm=norm,
            metrics={name: _average(m) for name, m in window.metrics.items()},
            finite=finite,
        )
        return moved, report

    def _commit(
        self, state: TrainState, window: Window, value: Array, active: Array
    ) -> tuple[TrainState, Array, Array]:
        """One optimizer update if the window has support and is finite; empties it."""
        gradient = pooled_gradient(self.objective, state, window)
        norm = optax.tree.norm(gradient).astype(jnp.float32)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        good = active & finite
        params = {"params": state.variables["params"]}
        updates, optimizer = optax.with_extra_args_support(self.optimizer).update(
            {"params": gradient}, state.optimizer, params, qk_stats=window.qk_stats
        )
        updated: Any = optax.apply_updates(params, updates)
        variables = {**state.variables, **updated}
        if window.effects is not None:
            effects = self.objective.apply_effects(variables, window.effects)
            variables = replaced(self.objective, variables, effects)
        moved = replace(
            state,
            commits=state.commits + 1,
            dropped=jnp.zeros_like(state.dropped),
            variables=variables,
            optimizer=optimizer,
            ema=next_average(self.objective, state, variables),
        )
        bad = active & ~finite
        stayed = replace(state, dropped=state.dropped + jnp.where(bad, 1, 0))
        closed = _where(good, moved, stayed)
        if state.window is not None:
            # Rows of a replay buffer are overwritten one by one; they need no clearing.
            empty = jax.tree.map(jnp.zeros_like, replace(window, replay=None))
            closed = replace(closed, window=empty.replace(replay=window.replay))
        return closed, norm, good


def _finite(tried: Evaluated) -> dict[str, Any]:
    """Flags of finite leaves, by what they belong to."""

    def flags(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)), tree)

    gradient = jax.tree.leaves(flags(tried.gradient))
    return {
        "statistics": flags(tried.stats),
        "gradient": jnp.stack(gradient) if gradient else jnp.ones((1,), bool),
        "variables": flags(tried.aux.variables),
        "effects": flags(tried.aux.effects),
        "metrics": flags(dict(tried.aux.metrics)),
    }


def _judged(finite: dict[str, Any]) -> list[Array]:
    """The flags that decide on a rejection; a metric alone is only worth a word."""
    return jax.tree.leaves({k: v for k, v in finite.items() if k != "metrics"})


def _as_mean(metric: Any) -> Mean:
    if isinstance(metric, Mean):
        return Mean(widen(metric.total), widen(metric.mass))
    number = jnp.asarray(metric, jnp.float32)
    return Mean(number, jnp.ones_like(number))


def _average(metric: Mean) -> Array:
    """The metric's value, NaN where nothing was measured."""
    mass = jnp.where(metric.mass > 0, metric.mass, 1)
    return jnp.where(metric.mass > 0, metric.total / mass, jnp.nan)


def _row_maxima(qk_stats: Any) -> Any:
    """Per-head maxima over a microbatch's rows, [1, heads], so that windows pool."""

    def over_rows(leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        return jnp.max(leaf, axis=0, keepdims=True) if leaf.ndim == 2 else leaf

    return jax.tree.map(over_rows, qk_stats)


def _zeros(leaf: Any) -> Array:
    """Zeros of a shape, or the key of that shape that is made of zeros."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)


def _additive(window: Window) -> dict[str, Any]:
    """The parts of a window that add up over microbatches."""
    return {
        "stats": window.stats,
        "metrics": window.metrics,
        "gradient": window.gradient,
        "effects": window.effects,
    }


def _where(condition: Array, yes: TrainState, no: TrainState) -> TrainState:
    """`yes` or `no`, leaf by leaf; a leaf that both share is passed on untouched."""
    return jax.tree.map(
        lambda a, b: a if a is b else jnp.where(condition, a, b), yes, no
    )
