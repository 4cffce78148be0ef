"""Batches with a live torch teacher's scores in them, at a position that resumes."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import transformers

from dew.bridges.teachers.live import LiveTeacher, Scoring
from dew.converters.open_folder import Address, open_folder
from dew.data.retokenize import Positioned
from dew.objectives.distillation.teachers import PrecomputedTeacher
from dew.typing import Batch


class LiveBatches(Iterator[Batch]):
    """Each batch with the teacher's scores; the teacher reads a batch ahead.

    The position is that of the last batch given, not of the last one read.
    """

    def __init__(self, data: Positioned, teacher: LiveTeacher) -> None:
        self._data, self._teacher = data, teacher
        self._ahead: deque[dict[str, Any]] = deque()
        self._position = data.get_state()
        self._scoring: Scoring | None = None

    def __next__(self) -> Batch:
        if self._scoring is None:
            self._scoring = self._teacher.scored(self._read())
        scored = next(self._scoring)
        self._position = self._ahead.popleft()
        return {name: np.asarray(array) for name, array in scored.items()}

    @property
    def teacher(self) -> PrecomputedTeacher:
        """What an objective takes as its teacher, to read these scores."""
        return self._teacher.teacher

    @property
    def waited_s(self) -> float:
        """Seconds that the trainer has waited for the teacher."""
        return 0.0 if self._scoring is None else self._scoring.waited_s

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch given."""
        return self._position

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position; what the teacher had read ahead is dropped."""
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
    """Loads a teacher in transformers and lets it read a stream of packed batches."""
    module = transformers.AutoModelForCausalLM.from_pretrained(
        open_folder(address).path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    # With a cache transformers no longer tells packed documents apart by positions.
    module.config.use_cache = False
    teacher = LiveTeacher(
        module=module, top_k=top_k, temperature=temperature, layers=layers
    )
    return LiveBatches(data, teacher)
