"""Batches with the scores of a live torch teacher, at a position that resumes."""

from collections import deque
from collections.abc import Iterator, Mapping

import jax
import numpy as np
import torch
import transformers

from dew.bridges.teachers.live import LiveTeacher, Scoring
from dew.converters.open_folder import Address, open_folder
from dew.data.retokenize import Positioned
from dew.objectives.distillation.teachers import PrecomputedTeacher
from dew.typing import Batch


class LiveBatches(Iterator[Batch]):
    """A stream of batches with a teacher's scores, computed a batch ahead.

    Its position is that of the last batch returned, not of the last one scored.
    """

    def __init__(self, data: Positioned, teacher: LiveTeacher) -> None:
        self._data, self._teacher = data, teacher
        self._ahead: deque[dict[str, object]] = deque()
        self._position = data.get_state()
        self._scoring: Scoring | None = None

    def __next__(self) -> Batch:
        if self._scoring is None:
            self._scoring = self._teacher.score_stream(self._read())
        scored = next(self._scoring)
        self._position = self._ahead.popleft()
        return {
            name: np.asarray(value) if isinstance(value, jax.Array) else value
            for name, value in scored.items()
        }

    @property
    def teacher(self) -> PrecomputedTeacher:
        """The teacher for an objective, which reads these scores from a batch."""
        return self._teacher.teacher

    @property
    def waited_s(self) -> float:
        """Seconds that the trainer has waited for the teacher."""
        return 0.0 if self._scoring is None else self._scoring.waited_s

    def get_state(self) -> dict[str, object]:
        """Returns the position after the last batch returned."""
        return self._position

    def set_state(self, state: Mapping[str, object]) -> None:
        """Moves to a position; batches scored ahead of it are dropped."""
        if self._scoring is not None:
            self._scoring.close()
        self._scoring, self._position = None, dict(state)
        self._ahead.clear()
        self._data.set_state(self._position)

    def _read(self) -> Iterator[Batch]:
        while (batch := next(self._data, None)) is not None:
            self._ahead.append(self._data.get_state())
            yield batch


def live_batches(
    address: Address,
    data: Positioned,
    *,
    top_k: int,
    temperature: float,
    layers: tuple[int, ...] = (),
) -> LiveBatches:
    """Loads a teacher in transformers to score a stream of packed batches.

    The teacher runs in float32. `top_k`, `temperature` and `layers` are those of
    `LiveTeacher`.
    """
    module = transformers.AutoModelForCausalLM.from_pretrained(
        open_folder(address).path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    # With a cache transformers no longer separates packed documents by positions.
    module.config.use_cache = False
    teacher = LiveTeacher(
        module=module, top_k=top_k, temperature=temperature, layers=layers
    )
    return LiveBatches(data, teacher)
