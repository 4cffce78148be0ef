"""The data as a training step reads it."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from dew.training.logs import TrainingError
from dew.training.sharding import place_batch
from dew.typing import Batch


@runtime_checkable
class Resumable(Protocol):
    """Data whose position can be read, as JSON, and restored."""

    def get_state(self) -> dict[str, Any]:
        """The position."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position."""
        ...


class Feed:
    """The data as the step reads it: arrays only, always of the same shapes."""

    def __init__(
        self, data: Iterator[Batch], mesh: Mesh | None, needed: set[str]
    ) -> None:
        self._data = data
        self._mesh = mesh
        self._needed = needed
        self._first: Batch | None = None
        self._spec: dict[str, str] = {}
        self.ended = False

    def peek(self) -> Batch:
        """The first batch, which `take` gives next."""
        if self._first is None:
            self._first = self.take()
        if self._first is None:
            raise TrainingError("the data is empty: it yielded no batch")
        return self._first

    def take(self) -> Batch | None:
        """The next batch on its devices, None once there is none."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            batch = next(self._data)
        except StopIteration:
            self.ended = True
            return None
        arrays = {
            k: v for k, v in batch.items() if isinstance(v, np.ndarray | jax.Array)
        }
        self._check(arrays)
        if self._mesh is not None:
            return place_batch(arrays, self._mesh)
        return {name: jax.numpy.asarray(array) for name, array in arrays.items()}

    def check_resumable(self) -> None:
        """Refuses data without a position where the run is to be resumable."""
        if not isinstance(self._data, Resumable):
            raise TypeError(
                f"checkpoints need data with get_state() and set_state(), which "
                f"{type(self._data).__name__} lacks"
            )

    def position(self) -> dict[str, Any] | None:
        """Where the data stands, for a checkpoint."""
        return self._data.get_state() if isinstance(self._data, Resumable) else None

    def go_to(self, position: dict[str, Any]) -> None:
        """Goes to a saved position; a batch already looked at is given back."""
        if isinstance(self._data, Resumable):
            self._data.set_state(position)
        self._first = None
        self.ended = False

    def _check(self, arrays: Mapping[str, Any]) -> None:
        lacking = sorted(self._needed - set(arrays))
        if lacking:
            raise ValueError(
                f"the batch lacks {', '.join(lacking)}, which the objective reads; it "
                f"has {', '.join(sorted(arrays)) or 'no array'}"
            )
        now = {name: f"{a.dtype}{list(a.shape)}" for name, a in arrays.items()}
        first = self._spec = self._spec or now
        faults = [
            f"{name} was {first.get(name, 'absent')}, is {now.get(name, 'absent')}"
            for name in sorted({*first, *now})
            if first.get(name) != now.get(name)
        ]
        if faults:
            raise ValueError(
                "every batch must look like the first, or the step would be compiled "
                "again: " + "; ".join(faults)
            )
