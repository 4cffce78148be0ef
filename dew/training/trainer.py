"""The loop: it dispatches steps, and stops to look only where something is due."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from dew.objectives.base import Objective
from dew.state import TrainState
from dew.training.callbacks import Callback
from dew.training.checkpoint import Checkpoints
from dew.training.evaluation import Evaluation, run_evaluation
from dew.training.feed import Feed
from dew.training.intervals import Intervals
from dew.training.logs import Log, RunLog, TrainingError
from dew.training.optimizers import Optimizer
from dew.training.sharding import DECODER_RULES, Rules, shardings_of
from dew.training.step import TrainStep
from dew.training.trackers import Tracker, TrackerGroup, several
from dew.typing import Batch


@dataclass(eq=False)
class Trainer:
    """Trains an objective; everything that moves is in the `TrainState` it returns.

    `optimizer` is one of dew's, or any optax transformation. A commit takes
    `accumulation` microbatches. On a `mesh`, batches are split over rows and leaves by
    `rules`. After `max_rejections` microbatches in a row that are not finite, or
    windows without support, the run stops. A tracker gets every log and evaluation,
    and `run_config` to begin with; one that throws is switched off and named, and the
    run goes on. `derived` adds to a log what follows from its other numbers.
    """

    objective: Objective[Any, Any]
    optimizer: Optimizer | optax.GradientTransformation
    _: KW_ONLY
    key: Key[Array, ""]
    mesh: Mesh | None = None
    rules: Rules = DECODER_RULES
    accumulation: int = 1
    max_rejections: int = 5
    checkpoints: Checkpoints | None = None
    tracker: Tracker | None = None
    run_config: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    derived: Callable[[Log], Mapping[str, float]] | None = None
    _tracker: TrackerGroup | None = field(default=None, init=False, repr=False)
    _placement: Any = field(default=None, init=False, repr=False)

    def fit(
        self,
        data: Iterator[Batch],
        *,
        steps: int,
        log_every: int = 10,
        evaluations: Mapping[str, Evaluation] | None = None,
        eval_every: int | None = None,
        eval_on_start: bool = False,
        resume: bool = False,
        profile: str | FilePath | None = None,
    ) -> TrainState:
        """Trains until `steps` commits have been made, and returns the state.

        Evaluations run every `eval_every` commits and after the last. With `resume`,
        the newest checkpoint is taken up where it stood, the data's position included.
        SIGTERM saves a checkpoint and exits with status 143. `profile` is a folder for
        jax's profiler, which watches the second commit after the start.

        Raises:
            ValueError: the folder of checkpoints is in use and `resume` is not set, or
                a batch has other keys, shapes or dtypes than the first.
            TrainingError: the data ended early, or too much of it came to nothing.
        """
        _check_periods(steps=steps, log_every=log_every, eval_every=eval_every)
        feed = Feed(data, self.mesh, set(self.objective.inputs))
        with _sigterm() as terminated, self._tracking() as tracker:
            state = self._start(feed, resume)
            commits = int(state.commits)
            tracker.start(self.run_config, step=commits)
            for callback in self.callbacks:
                callback.on_start(commits, steps)
            if evaluations and eval_on_start and commits == 0:
                self._evaluate(state, evaluations)
            cadence = Intervals(
                first=commits + 1,
                last=steps,
                log=log_every,
                evaluate=eval_every if evaluations else None,
                save=self.checkpoints.every if self.checkpoints else None,
                profiled=profile,
            )
            ledger = RunLog(self.max_rejections)
            while commits < steps:
                goal = cadence.next(commits)
                with cadence.watching(commits):
                    state = self._advance(state, feed, ledger, goal, terminated)
                commits = int(state.commits)
                self._stop_if(terminated, feed, state, steps)
                if commits == goal:
                    self._attend(state, feed, ledger, cadence, evaluations or {})
        if self.checkpoints is not None:
            self.checkpoints.wait()
        return state

    @cached_property
    def _step(self) -> TrainStep:
        optimizer = self.optimizer
        if isinstance(optimizer, Optimizer):
            optimizer = optimizer.transform
        return TrainStep(
            objective=self.objective,
            optimizer=optax.with_extra_args_support(optimizer),
            accumulation=self.accumulation,
            max_rejections=self.max_rejections,
        )

    @cached_property
    def _attempt(self) -> Any:
        """The step, compiled once and given the state's own memory."""
        if self.mesh is None:
            return jax.jit(self._step.attempt, donate_argnums=0)
        # Left free, GSPMD would place new leaves elsewhere and compile once more.
        out = (self._placement, NamedSharding(self.mesh, PartitionSpec()))
        return jax.jit(self._step.attempt, donate_argnums=0, out_shardings=out)

    def _start(self, feed: Feed, resume: bool) -> TrainState:
        """A new run's state, or the newest checkpoint's."""
        saved = self.checkpoints
        if saved is None:
            if resume:
                raise ValueError("resume=True needs Trainer(checkpoints=…)")
            return self._build(feed.peek())
        feed.check_resumable()
        if saved.latest() is None:
            return self._build(feed.peek())
        if not resume:
            raise ValueError(
                f"{saved.folder} already holds commit {saved.latest()}: pass "
                "resume=True to go on from it, or give another folder"
            )
        state = self._build(feed.peek())
        state, position = saved.restore(state, self.objective)
        feed.go_to(position)
        return state

    def _build(self, batch: Batch) -> TrainState:
        """The initial state, made inside one JIT and placed as it will stay."""
        initializer = self.objective.initializer
        build = self._step.initial
        if self.mesh is None:
            return jax.jit(build)(initializer, self.key, batch)
        # Loaded weights are split before the JIT sees them: never whole on each device.
        placed = shardings_of(initializer, self.mesh, self.rules)
        initializer = jax.device_put(initializer, placed)
        shapes = jax.eval_shape(build, initializer, self.key, batch)
        self._placement = shardings_of(shapes, self.mesh, self.rules)
        build = jax.jit(build, out_shardings=self._placement)
        return build(initializer, self.key, batch)

    def _advance(
        self,
        state: TrainState,
        feed: Feed,
        ledger: RunLog,
        goal: int,
        terminated: threading.Event,
    ) -> TrainState:
        """Dispatches what it takes to reach `goal` commits if nothing is rejected."""
        commits = int(state.commits)
        open_ = 0 if state.window is None else int(state.window.count)
        for _ in range((goal - commits) * self.accumulation - open_):
            batch = None if terminated.is_set() else feed.take()
            if batch is None:
                break
            state, report = self._attempt(state, batch)
            ledger.add(report, _tokens(batch))
        ledger.read(commits, state.variables["params"])
        return state

    def _stop_if(
        self, terminated: threading.Event, feed: Feed, state: TrainState, steps: int
    ) -> None:
        """Saves and leaves where a signal or the end of the data says so."""
        ended = feed.ended and int(state.commits) < steps
        if not (terminated.is_set() or ended):
            return
        self._save(state, feed, None)
        if self.checkpoints is not None:
            self.checkpoints.wait()
        if terminated.is_set():
            raise SystemExit(143)
        kept = "" if self.checkpoints is None else "; a checkpoint was saved"
        raise TrainingError(
            f"the data ended after {int(state.commits)} of {steps} commits{kept}: give "
            "more data, let it repeat, or ask for fewer steps"
        )

    def _attend(
        self,
        state: TrainState,
        feed: Feed,
        ledger: RunLog,
        cadence: Intervals,
        evaluations: Mapping[str, Evaluation],
    ) -> None:
        """Logs, evaluates and saves what is due at this commit."""
        commits = int(state.commits)
        if cadence.is_log_due(commits):
            log = ledger.close(self._learning_rate(commits - 1))
            if self.derived is not None:
                log = replace(log, metrics={**log.metrics, **self.derived(log)})
            self._record(commits, "train", log.metrics)
            for callback in self.callbacks:
                callback.on_log(log)
        began = time.perf_counter()
        metrics = None
        is_last = commits == cadence.last
        if evaluations and (is_last or cadence.is_due(cadence.evaluate, commits)):
            metrics = self._evaluate(state, evaluations)
        if cadence.is_due(cadence.save, commits):
            self._save(state, feed, metrics)
        ledger.skip(time.perf_counter() - began)

    def _evaluate(
        self, state: TrainState, evaluations: Mapping[str, Evaluation]
    ) -> dict[str, float]:
        """Runs every named set; with an EMA, over its weights as well."""
        commits = int(state.commits)
        averaged = state.averaged
        metrics = {}
        for i, (name, evaluation) in enumerate(evaluations.items()):
            weights = {name: state.variables}
            if averaged is not None:
                weights[f"{name}_ema"] = averaged
            key = jax.random.fold_in(jax.random.fold_in(self.key, i), commits)
            for label, variables in weights.items():
                numbers = run_evaluation(
                    self.objective,
                    variables,
                    evaluation,
                    key=key,
                    step=int(state.accepted),
                    ema=averaged,
                    mesh=self.mesh,
                    preview=partial(self._show, commits, label),
                )
                metrics |= {f"{label}/{metric}": v for metric, v in numbers.items()}
        self._record(commits, "eval", metrics)
        for callback in self.callbacks:
            callback.on_eval(commits, metrics)
        return metrics

    def _show(self, step: int, name: str, shown: Any) -> None:
        for callback in self.callbacks:
            callback.on_preview(step, name, shown)

    def _save(
        self, state: TrainState, feed: Feed, metrics: Mapping[str, float] | None
    ) -> None:
        if self.checkpoints is None:
            return
        step = self.checkpoints.save(
            state, self.objective, data=feed.position(), metrics=metrics
        )
        for callback in self.callbacks:
            callback.on_save(step)

    def _record(self, step: int, part: str, metrics: Mapping[str, float]) -> None:
        if self._tracker is not None:
            named = {f"{part}/{name}": value for name, value in metrics.items()}
            self._tracker.log(step, named)

    @contextmanager
    def _tracking(self) -> Iterator[TrackerGroup]:
        """The tracker, guarded; the first process alone has one."""
        first = jax.process_index() == 0
        own = [self.tracker] if self.tracker is not None and first else []
        self._tracker = several(*own)
        try:
            yield self._tracker
        finally:
            faults = self._tracker.finish()
            for callback in self.callbacks:
                callback.on_end(faults)

    def _learning_rate(self, commits: int) -> float | None:
        """The rate that the commit after so many others was made with."""
        if not isinstance(self.optimizer, Optimizer):
            return None
        return float(np.asarray(self.optimizer.schedule(commits)))


def _check_periods(**periods: int | None) -> None:
    faults = [
        f"{name} must be >= 1, got {period}"
        for name, period in periods.items()
        if period is not None and period < 1
    ]
    if faults:
        raise ValueError("; ".join(faults))


def _tokens(batch: Batch) -> int:
    """Tokens of a batch, or its rows where it has none."""
    if "tokens" in batch:
        return batch["tokens"].size
    return len(next(iter(batch.values())))


@contextmanager
def _sigterm() -> Iterator[threading.Event]:
    """Turns SIGTERM into a flag for as long as this lasts."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = signal.signal(signal.SIGTERM, lambda *_: flag.set())
    try:
        yield flag
    finally:
        signal.signal(signal.SIGTERM, before)
