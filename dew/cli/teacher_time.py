"""What `dew distill` logs beside the objective's own metrics."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dew.losses.chunking import whole_scores
from dew.losses.diagnostics import perplexities
from dew.losses.scores import DenseScores
from dew.objectives.base import Step
from dew.objectives.distillation.teachers import Teacher
from dew.training.logs import Log
from dew.typing import Batch, Variables


@dataclass
class Watch:
    """Adds perplexities, and the teacher's share of the time, to a log.

    `teacher_seconds` says how long the teacher took in the interval of a log.
    """

    teacher_seconds: Callable[[Log], float] | None = None
    last: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, log: Log) -> Mapping[str, float]:
        """What follows from the numbers of one interval."""
        found = perplexities(log.metrics)
        if self.teacher_seconds is not None:
            found["teacher_share"] = self.teacher_seconds(log) / log.seconds
        self.last = found
        return found


def seconds_a_token(teacher: Teacher, *, rows: int, seq_len: int) -> float:
    """Times a teacher alone, compiled, on a batch of the run's shape.

    The better of two passes; in the step it may share work, which it never needs to.
    """
    variables = teacher.init(jax.random.key(0), teacher.held_variables())
    place = jnp.broadcast_to(jnp.arange(seq_len, dtype=jnp.int32), (rows, seq_len))
    batch = {
        "tokens": place % 7,
        "positions": place,
        "segment_ids": jnp.ones((rows, seq_len), jnp.int32),
    }
    step = Step(jnp.int32(0), jax.random.key(0))

    def score(variables: Variables, batch: Batch) -> Array:
        scored = teacher.score(variables, batch, step, layers=(), split=False)
        scores = whole_scores(scored.scores)
        if not isinstance(scores, DenseScores):
            raise TypeError(f"expected logits to time, got {type(scores).__name__}")
        # All logits are computed; only their largest leaves the program.
        return jnp.max(scores.logits)

    run = jax.jit(score)
    jax.block_until_ready(run(variables, batch))
    times = []
    for _ in range(2):
        began = time.perf_counter()
        jax.block_until_ready(run(variables, batch))
        times.append(time.perf_counter() - began)
    return min(times) / (rows * seq_len)


def waited(seconds: Callable[[], float]) -> Callable[[Log], float]:
    """Turns a running total of seconds into those of each interval."""
    before = [seconds()]

    def since(log: Log) -> float:
        now = seconds()
        spent, before[0] = now - before[0], now
        return spent

    return since
