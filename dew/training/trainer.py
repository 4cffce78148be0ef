"""The training loop: it dispatches steps, and waits only where something is due."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path as FilePath
from typing import TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from dew.batch import row_counts
from dew.objectives.base import AnyObjective
from dew.objectives.tokens import TokenModel
from dew.processes import (
    exchange_messages,
    process_phase,
    process_run,
    wait_with_processes,
)
from dew.state import TrainState
from dew.training.callbacks import Callback
from dew.training.checkpoint import Checkpoints
from dew.training.evaluation import Evaluation, run_evaluation
from dew.training.feed import Feed
from dew.training.held import held_paths, supplied_paths
from dew.training.intervals import Intervals
from dew.training.logs import Log, RunLog, TrainingError
from dew.training.optimizers import Optimizer
from dew.training.sharding import DECODER_RULES, Rules, shardings_of
from dew.training.signals import Stopped, StopSignals, raise_stop, stop_signals
from dew.training.step import Report, TrainStep
from dew.training.trackers import Tracker, TrackerGroup, join_trackers
from dew.typing import Batch, Path

Attempt: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, Report]]
"""The signature of `TrainStep.attempt`, compiled or not."""


ENDED = "ended"
"""The message of a process whose data has ended."""


@dataclass(kw_only=True)
class Run:
    """Objects of one call of `Trainer.fit`, and the commit of its last checkpoint."""

    attempt: Attempt
    feed: Feed
    tracker: TrackerGroup
    log: RunLog
    intervals: Intervals
    evaluations: Mapping[str, Evaluation]
    signals: StopSignals
    held: frozenset[Path]
    saved: int | None = None


@dataclass(eq=False)
class Trainer:
    """Trains an objective; all that changes is in the `TrainState` that `fit` returns.

    `optimizer` is one of dew's, or any optax transformation. A commit takes
    `accumulation` microbatches. On a `mesh`, batches are split over rows and leaves by
    `rules`. After `max_rejections` microbatches in a row that are not finite, or
    windows without support, the run stops. A tracker gets `run_config` at the start,
    then every log and evaluation; one that throws is switched off and named, and the
    run goes on. `derived` computes further metrics of a log from its others.

    >>> import dew
    >>> from dew.data import training_batches
    >>> from dew.objectives.causal_lm import CausalLM
    >>> from dew.training.optimizers import adamw
    >>> source = dew.load(FOLDER)
    >>> data = training_batches(
    ...     ["w1 w2 w3 w4"], tokenizer=source.tokenizer, seq_len=4, batch_size=2, seed=0
    ... )
    >>> objective = CausalLM(source=source, seq_len=4)
    >>> trainer = Trainer(objective, adamw(1e-3), key=jax.random.key(0))
    >>> state = trainer.fit(data, steps=3)
    >>> int(state.commits)
    3
    """

    objective: AnyObjective
    optimizer: Optimizer | optax.GradientTransformation
    _: KW_ONLY
    key: Key[Array, ""]
    mesh: Mesh | None = None
    rules: Rules = DECODER_RULES
    accumulation: int = 1
    max_rejections: int = 5
    checkpoints: Checkpoints | None = None
    tracker: Tracker | None = None
    run_config: Mapping[str, object] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    derived: Callable[[Log], Mapping[str, float]] | None = None

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
        the run continues from the newest checkpoint, the data's position included.
        `profile` is a folder for jax's profiler, which records the second commit after
        the start.

        SIGTERM and Ctrl-C, in any process, stop all of them after the same microbatch;
        a checkpoint is saved if there is a commit that has none yet. A second Ctrl-C
        ends the process at once. An exception in one process ends all.

        Raises:
            ValueError: the folder of checkpoints is in use and `resume` is not set, or
                a batch has other keys, shapes or dtypes than the first.
            TrainingError: the data ended early, or too many microbatches or windows in
                a row were rejected or dropped.
            ProcessError: another process failed, or no longer answers.
            SystemExit: a signal stopped the run; the status is 143 after SIGTERM and
                130 after Ctrl-C.
        """
        _check_periods(steps=steps, log_every=log_every, eval_every=eval_every)
        objective = self.objective
        rows = objective.vocabulary_rows if isinstance(objective, TokenModel) else None
        feed = Feed(data, self.mesh, objective.inputs, vocabulary_rows=rows)
        try:
            with (
                stop_signals() as signals,
                process_run("the run"),
                self._open_tracker() as tracker,
            ):
                state, attempt, held = self._start(feed, resume, signals)
                commits = int(state.commits)
                run = Run(
                    attempt=attempt,
                    feed=feed,
                    tracker=tracker,
                    log=RunLog(self.max_rejections, type(self.objective).__name__),
                    intervals=Intervals(
                        first=commits + 1,
                        last=steps,
                        log=log_every,
                        evaluate=eval_every if evaluations else None,
                        save=self.checkpoints.every if self.checkpoints else None,
                        profile=profile,
                    ),
                    evaluations=evaluations or {},
                    signals=signals,
                    held=held,
                )
                return self._run(state, run, eval_on_start=eval_on_start)
        except Stopped as stopped:
            raise SystemExit(128 + stopped.number) from None

    def _run(self, state: TrainState, run: Run, *, eval_on_start: bool) -> TrainState:
        """Calls the hooks of the start, and trains to the last commit."""
        commits, steps = int(state.commits), run.intervals.last
        run.saved = commits if commits else None
        try:
            with run.signals.phase("the start"):
                run.tracker.start(self.run_config, step=commits)
                for callback in self.callbacks:
                    callback.on_start(commits, steps)
            if run.evaluations and eval_on_start and commits == 0:
                self._evaluate(state, run)
            run.log.restart()
            while commits < steps:
                goal = run.intervals.next(commits)
                with run.intervals.profiler(commits):
                    state, messages = self._advance(state, run, goal)
                commits = int(state.commits)
                raise_stop(messages)
                if commits < steps and ENDED in messages:
                    self._end_early(state, run, messages)
                if commits == goal:
                    self._log_evaluate_save(state, run)
            self._wait_for_checkpoints()
            with run.signals.phase("the end"):
                pass
        except Stopped as stopped:
            self._stop(state, run, stopped)
            raise
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
    def _attempt(self) -> Attempt:
        """One bound method: jax's cache goes by it, so a second `fit` compiles less."""
        return self._step.attempt

    def _start(
        self, feed: Feed, resume: bool, signals: StopSignals
    ) -> tuple[TrainState, Attempt, frozenset[Path]]:
        """Returns the state of a new run or of the newest checkpoint, and the step.

        Beside them are the paths of the leaves that the run holds.
        """
        saved = self.checkpoints
        with signals.phase("the first batch"):
            if saved is not None:
                feed.check_resumable()
                self._check_folder(saved, resume)
            elif resume:
                raise ValueError("resume=True needs Trainer(checkpoints=…)")
            batch = feed.peek()
        state, attempt, held = self._build(batch)
        if saved is not None and saved.latest() is not None:
            new = state
            state, position = wait_with_processes(
                lambda: saved.restore(new, self.objective, held=held)
            )
            with signals.phase("the data's position"):
                feed.go_to(position)
        return state, attempt, held

    def _check_folder(self, saved: Checkpoints, resume: bool) -> None:
        """Raises where the folder of checkpoints holds a run that is not resumed."""
        if saved.latest() is not None and not resume:
            raise ValueError(
                f"{saved.folder} already holds commit {saved.latest()}: pass "
                "resume=True to go on from it, or give another folder"
            )

    def _build(self, batch: Batch) -> tuple[TrainState, Attempt, frozenset[Path]]:
        """Builds the initial state inside one JIT, and the step that takes its memory.

        On a mesh both are placed by the same shardings.
        """
        initializer = self.objective.initializer
        supplied = supplied_paths(initializer)

        def with_held(
            state: TrainState, attempt: Attempt
        ) -> tuple[TrainState, Attempt, frozenset[Path]]:
            held = held_paths(self.objective, supplied, state.variables, batch)
            return state, attempt, held

        build = self._step.initial
        if self.mesh is None:
            state = jax.jit(build)(initializer, self.key, batch)
            return with_held(state, jax.jit(self._attempt, donate_argnums=0))
        # Loaded weights are split before the JIT gets them: never whole on each device.
        shardings = shardings_of(initializer, self.mesh, self.rules)
        initializer = jax.device_put(initializer, shardings)
        shapes = jax.eval_shape(build, initializer, self.key, batch)
        shardings = shardings_of(shapes, self.mesh, self.rules)
        build = jax.jit(build, out_shardings=shardings)
        # Left free, GSPMD would place new leaves elsewhere and compile once more.
        out = (shardings, NamedSharding(self.mesh, PartitionSpec()))
        attempt = jax.jit(self._attempt, donate_argnums=0, out_shardings=out)
        return with_held(build(initializer, self.key, batch), attempt)

    def _advance(
        self, state: TrainState, run: Run, goal: int
    ) -> tuple[TrainState, list[str]]:
        """Dispatches what it takes to reach `goal` commits if nothing is rejected.

        Returns the last messages of all processes as well: a signal's number or `ENDED`
        where one of them does not go on.
        """
        commits = int(state.commits)
        messages: list[str] = []
        # A resumed window already holds some of its microbatches.
        in_window = 0 if state.window is None else int(state.window.count)
        for _ in range((goal - commits) * self.accumulation - in_window):
            batch, messages = self._next_batch(run)
            if batch is None:
                break
            state, report = run.attempt(state, batch)
            run.log.add(report, _tokens(batch))
        # Reading waits for the collectives of all steps so far.
        params = state.variables["params"]
        with process_phase("the steps"):
            wait_with_processes(lambda: run.log.read(commits, params))
        return state, messages

    def _next_batch(self, run: Run) -> tuple[Batch | None, list[str]]:
        """Takes a batch in every process, or in none; and what they say."""
        batch: Batch | None = None
        fault: Exception | None = None
        message = run.signals.message
        if not message:
            try:
                batch = run.feed.take()
            except Exception as raised:
                fault = raised
            if batch is None and fault is None:
                message = ENDED
        messages = exchange_messages("the next batch", message, fault)
        if any(messages):
            if batch is not None:
                run.feed.put_back(batch)
            return None, messages
        return batch, messages

    def _end_early(self, state: TrainState, run: Run, messages: list[str]) -> None:
        """Saves, and raises as the data ended before the last commit."""
        commits, steps = int(state.commits), run.intervals.last
        self._save_new(state, run)
        ended = [str(i) for i, message in enumerate(messages) if message == ENDED]
        where = f" in process {', '.join(ended)}" if len(messages) > 1 else ""
        saved = "" if run.saved is None else "; a checkpoint was saved"
        raise TrainingError(
            f"the data ended{where} after {commits} of {steps} commits{saved}: give "
            "more data, let it repeat, or ask for fewer steps"
        )

    def _stop(self, state: TrainState, run: Run, stopped: Stopped) -> None:
        """Saves what has no checkpoint yet, and says on stderr where the run is."""
        self._save_new(state, run)
        if jax.process_index():
            return
        where = f"after commit {int(state.commits)} of {run.intervals.last}"
        kept = (
            "nothing was saved, as the run has no checkpoints"
            if self.checkpoints is None
            else "there was no commit to save"
            if run.saved is None
            else f"its checkpoint is in {self.checkpoints.folder}"
        )
        print(f"stopped by {stopped} {where}; {kept}", file=sys.stderr, flush=True)

    def _save_new(self, state: TrainState, run: Run) -> None:
        """Saves a commit that has no checkpoint, and waits until all are on disk.

        A window that is open after a saved commit is not saved: its microbatches are
        taken anew when the run goes on, with the same random keys.
        """
        commits = int(state.commits)
        if commits and commits != run.saved:
            self._save(state, run, None)
        self._wait_for_checkpoints()

    def _wait_for_checkpoints(self) -> None:
        if self.checkpoints is not None:
            wait_with_processes(self.checkpoints.wait)

    def _log_evaluate_save(self, state: TrainState, run: Run) -> None:
        """Logs, evaluates and saves what is due at this commit."""
        commits, intervals = int(state.commits), run.intervals
        if intervals.is_log_due(commits):
            log = run.log.close(self._learning_rate(commits - 1))
            with run.signals.phase("the log"):
                self._log(log, run)
        began = time.perf_counter()
        metrics = None
        is_last = commits == intervals.last
        is_due = is_last or intervals.is_due(intervals.evaluate, commits)
        if run.evaluations and is_due:
            metrics = self._evaluate(state, run)
        if intervals.is_due(intervals.save, commits):
            self._save(state, run, metrics)
        run.log.skip(time.perf_counter() - began)

    def _log(self, log: Log, run: Run) -> None:
        if self.derived is not None:
            log = replace(log, metrics={**log.metrics, **self.derived(log)})
        _track(run.tracker, log.step, "train", log.metrics)
        for callback in self.callbacks:
            callback.on_log(log)

    def _evaluate(self, state: TrainState, run: Run) -> dict[str, float]:
        """Evaluates every named set; with an EMA, on its weights as well."""
        commits = int(state.commits)
        averaged = state.averaged
        metrics = {}
        for i, (name, evaluation) in enumerate(run.evaluations.items()):
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
                    preview=partial(self._preview, commits, label),
                    signals=run.signals,
                )
                metrics |= {f"{label}/{metric}": v for metric, v in numbers.items()}
        with run.signals.phase("the evaluation's report"):
            _track(run.tracker, commits, "eval", metrics)
            for callback in self.callbacks:
                callback.on_eval(commits, metrics)
        return metrics

    def _preview(self, step: int, name: str, preview: object) -> None:
        if preview is None:
            return
        for callback in self.callbacks:
            callback.on_preview(step, name, preview)

    def _save(
        self, state: TrainState, run: Run, metrics: Mapping[str, float] | None
    ) -> None:
        if self.checkpoints is None:
            return
        checkpoints = self.checkpoints
        with process_phase("the save"):
            # Orbax's own wait for all processes comes after: it would be for ever.
            wait_with_processes(checkpoints.wait)
            position = run.feed.position()
        step = wait_with_processes(
            lambda: checkpoints.save(
                state, self.objective, data=position, metrics=metrics, held=run.held
            )
        )
        run.saved = step
        with process_phase("the save's report"):
            for callback in self.callbacks:
                callback.on_save(step)

    @contextmanager
    def _open_tracker(self) -> Iterator[TrackerGroup]:
        """Guards the run's tracker and finishes it; only the first process has one."""
        is_first = jax.process_index() == 0
        trackers = [self.tracker] if self.tracker is not None and is_first else []
        tracker = join_trackers(*trackers)
        try:
            yield tracker
        finally:
            faults = tracker.finish()
            for callback in self.callbacks:
                callback.on_end(faults)

    def _learning_rate(self, commits: int) -> float | None:
        """Returns the learning rate of the commit that followed so many others."""
        if not isinstance(self.optimizer, Optimizer):
            return None
        return float(np.asarray(self.optimizer.schedule(commits)))


def _track(
    tracker: Tracker, step: int, part: str, metrics: Mapping[str, float]
) -> None:
    tracker.log(step, {f"{part}/{name}": value for name, value in metrics.items()})


def _check_periods(**periods: int | None) -> None:
    faults = [
        f"{name} must be >= 1, got {period}"
        for name, period in periods.items()
        if period is not None and period < 1
    ]
    if faults:
        raise ValueError("; ".join(faults))


def _tokens(batch: Batch) -> int:
    """Counts the tokens of a batch, or its rows where it has none."""
    tokens = batch.get("tokens")
    if isinstance(tokens, jax.Array):
        return tokens.size
    return max(row_counts(batch).values(), default=0)
