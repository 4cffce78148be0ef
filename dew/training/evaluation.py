"""Validation passes, which score a whole set and reduce its metrics exactly."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Key

from dew.objectives.base import AnyObjective, Metric, Step
from dew.training.sharding import place_batch
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
) -> dict[str, float]:
    """Scores a whole validation set and returns the value of each metric.

    Every process takes part and gets the same result; each batch has its own key.
    `preview` is called with the objective's preview of the first batch, made with a
    key of its own.

    Raises:
        TypeError: a metric reads another artifact than the objective's, or the
            objective evaluates to another than it declares.
        ValueError: the set is empty.
    """
    _check(objective, evaluation)
    accumulated: dict[str, Any] = {}
    for i, batch in enumerate(evaluation.batches()):
        placed = batch if mesh is None else place_batch(batch, mesh)
        now = Step(jax.numpy.int32(step), jax.random.fold_in(key, i), ema)
        scored = objective.evaluate(variables, placed, now)
        _check_artifact(objective, scored)
        if i == 0 and preview is not None:
            preview_step = replace(now, key=jax.random.fold_in(key, PREVIEW))
            preview(objective.preview(variables, placed, preview_step, scored=scored))
        if not evaluation.metrics:
            return {}
        artifact = _on_host(scored)
        for name, metric in evaluation.metrics.items():
            contribution = metric(artifact)
            if name in accumulated:
                contribution = metric.merge(accumulated[name], contribution)
            accumulated[name] = contribution
    if not accumulated:
        raise ValueError("the validation set is empty: it yielded no batch")
    return {
        name: float(metric.finalize(accumulated[name]))
        for name, metric in evaluation.metrics.items()
    }


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
