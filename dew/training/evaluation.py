"""Validation passes, which score a whole set and reduce its metrics exactly."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Key

from dew.batch import arrays_of, with_arrays
from dew.objectives.base import AnyObjective, Metric, Step
from dew.processes import exchange_messages, wait_with_processes
from dew.training.parts import align, describe, drop_padding
from dew.training.sharding import place_batch
from dew.training.signals import StopSignals, raise_stop
from dew.typing import Batch, Variables

PREVIEW = 2**31 - 1
"""Folded into a pass's key for its preview; no batch has that number."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A validation set, opened anew for each pass, and its metrics by name.

    Without metrics a pass ends after the preview of its first batch.
    """

    batches: Callable[[], Iterable[Batch]]
    metrics: Mapping[str, Metric[Any]] = field(default_factory=dict)


def run_evaluation(
    objective: AnyObjective,
    variables: Variables,
    evaluation: Evaluation,
    *,
    key: Key[Array, ""],
    step: int = 0,
    ema: Variables | None = None,
    mesh: Mesh | None = None,
    preview: Callable[[object], None] | None = None,
    signals: StopSignals | None = None,
) -> dict[str, float]:
    """Scores a whole validation set and returns the value of each metric.

    Every process takes part and gets the same result; each batch has its own key.
    `preview` is called with the objective's preview of the first batch, made with a
    key of its own. Parts of the set may differ between processes, in batches and in
    their rows: the result is that of the whole set in one process. A signal noted by
    `signals` in one process ends the pass in all.

    Raises:
        ProcessError: the data, the preview or a metric failed in another process.
        Stopped: a process got a signal.
        TypeError: a metric reads another artifact than the objective's, or the
            objective evaluates to another than it declares.
        ValueError: the set is empty.
    """
    signals = StopSignals() if signals is None else signals
    with signals.phase("the evaluation's start"):
        _check(objective, evaluation)
        batches = iter(evaluation.batches())
    accumulated: dict[str, Any] = {}
    artifact: Any = None
    for i in itertools.count():
        # What one process does alone, between two collectives, is one phase.
        batch, is_real = _next_batch(
            batches, signals, partial(_accumulate, accumulated, evaluation, artifact)
        )
        if batch is None:
            break
        if mesh is None:
            placed = with_arrays(batch, arrays_of(batch))
        else:
            placed = place_batch(batch, mesh)
        now = Step(jax.numpy.int32(step), jax.random.fold_in(key, i), ema)
        scored = objective.evaluate(variables, placed, now)
        _check_artifact(objective, scored)
        if i == 0 and preview is not None:
            preview_step = replace(now, key=jax.random.fold_in(key, PREVIEW))
            with signals.phase("preview"):
                preview(
                    objective.preview(variables, placed, preview_step, scored=scored)
                )
        if not evaluation.metrics:
            return {}
        artifact = drop_padding(wait_with_processes(partial(_on_host, scored)), is_real)
    with signals.phase("the metrics"):
        if not accumulated:
            raise ValueError("the validation set is empty: it yielded no batch")
        return {
            name: float(metric.finalize(accumulated[name]))
            for name, metric in evaluation.metrics.items()
        }


def _next_batch(
    batches: Iterator[Batch], signals: StopSignals, before: Callable[[], None]
) -> tuple[Batch | None, np.ndarray | None]:
    """Takes a batch in every process, as large in each, after a call to `before`.

    Returns the flags of its global rows as well, as `align` does.
    """
    batch: Batch | None = None
    form = ""
    fault: Exception | None = None
    try:
        before()
        batch = next(batches, None)
        if jax.process_count() > 1:
            form = describe(batch)
    except Exception as raised:
        fault = raised
    messages = exchange_messages(
        "an evaluation's batch", signals.message or form, fault
    )
    raise_stop(messages)
    return (batch, None) if len(messages) == 1 else align(batch, messages)


def _accumulate(
    accumulated: dict[str, Any], evaluation: Evaluation, artifact: Any
) -> None:
    """Adds what each metric makes of an artifact, None before the first."""
    if artifact is None:
        return
    for name, metric in evaluation.metrics.items():
        contribution = metric(artifact)
        if name in accumulated:
            contribution = metric.merge(accumulated[name], contribution)
        accumulated[name] = contribution


def _check(objective: AnyObjective, evaluation: Evaluation) -> None:
    faults = [
        f"{name} reads {metric.reads.__name__}"
        for name, metric in evaluation.metrics.items()
        if objective.artifact is None
        or not issubclass(objective.artifact, metric.reads)
    ]
    if faults:
        made = "nothing" if objective.artifact is None else objective.artifact.__name__
        raise TypeError(
            f"{type(objective).__name__} evaluates to {made}, but " + "; ".join(faults)
        )


def _check_artifact(objective: AnyObjective, scored: Any) -> None:
    """Raises a TypeError where an evaluation is not of the declared type."""
    declared = objective.artifact
    if isinstance(scored, type(None) if declared is None else declared):
        return
    name = type(objective).__name__
    stated = "None" if declared is None else declared.__name__
    returned = "None" if scored is None else f"a {type(scored).__name__}"
    raise TypeError(
        f"{name}.evaluate returned {returned}, and {name}.artifact is {stated}; set it "
        "to the type that evaluate returns"
    )


def _on_host(artifact: Any) -> Any:
    """Gathers an artifact's arrays over all global rows, as numpy."""
    if jax.process_count() > 1:
        return multihost_utils.process_allgather(artifact, tiled=True)
    return jax.device_get(artifact)
