"""Validation passes: every batch scored, every metric over the whole set."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Key

from dew.objectives.base import Metric, Objective, Step
from dew.training.sharding import place_batch
from dew.typing import Batch, Variables

PREVIEW = 2**31 - 1
"""Folded into a pass's key for its preview; no batch has that number."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One named validation set: how to read it from its start, and what to measure."""

    batches: Callable[[], Iterable[Batch]]
    metrics: Mapping[str, Metric[Any]]


def run_evaluation(
    objective: Objective[Any, Any],
    variables: Variables,
    evaluation: Evaluation,
    *,
    key: Key[Array, ""],
    step: int = 0,
    ema: Variables | None = None,
    mesh: Mesh | None = None,
    preview: Callable[[Any], None] | None = None,
) -> dict[str, float]:
    """Scores a whole set and returns each metric's number.

    Every process takes part and gets the same answer; each batch has its own key.
    `preview` is told what the objective shows of the first batch, with a key apart.

    Raises:
        TypeError: a metric reads another artifact than the objective's.
        ValueError: the set is empty.
    """
    _check(objective, evaluation)
    accumulated: dict[str, Any] = {}
    for i, batch in enumerate(evaluation.batches()):
        placed = batch if mesh is None else place_batch(batch, mesh)
        now = Step(jax.numpy.int32(step), jax.random.fold_in(key, i), ema)
        scored = objective.evaluate(variables, placed, now)
        if i == 0 and preview is not None:
            apart = replace(now, key=jax.random.fold_in(key, PREVIEW))
            preview(objective.preview(variables, placed, apart, scored=scored))
        artifact = _on_host(scored)
        for name, metric in evaluation.metrics.items():
            contribution = metric(artifact)
            known = name in accumulated
            accumulated[name] = (
                metric.merge(accumulated[name], contribution) if known else contribution
            )
    if not accumulated:
        raise ValueError("the validation set is empty: it yielded no batch")
    return {
        name: float(metric.finalize(accumulated[name]))
        for name, metric in evaluation.metrics.items()
    }


def _check(objective: Objective[Any, Any], evaluation: Evaluation) -> None:
    faults = [
        f"{name} reads {metric.reads.__name__}"
        for name, metric in evaluation.metrics.items()
        if objective.artifact is None
        or not issubclass(objective.artifact, metric.reads)
    ]
    if faults or not evaluation.metrics:
        made = "nothing" if objective.artifact is None else objective.artifact.__name__
        raise TypeError(
            f"{type(objective).__name__} evaluates to {made}, but "
            + ("; ".join(faults) or "no metric is given")
        )


def _on_host(artifact: Any) -> Any:
    """The artifact's arrays for every global row, as numpy."""
    if jax.process_count() > 1:
        return multihost_utils.process_allgather(artifact, tiled=True)
    return jax.device_get(artifact)
