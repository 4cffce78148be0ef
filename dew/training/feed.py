"""Batches for the training step: checked, stripped to arrays, placed on devices."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from dew.training.logs import TrainingError
from dew.training.sharding import place_batch
from dew.tree import array_text
from dew.typing import Batch


@runtime_checkable
class Resumable(Protocol):
    """Data whose position can be read, as JSON values, and restored."""

    def get_state(self) -> dict[str, object]:
        """Returns the position after the last batch."""
        ...

    def set_state(self, state: dict[str, object]) -> None:
        """Moves to a position that `get_state` returned."""
        ...


class Feed:
    """Batches of arrays on their devices, all of the first one's shapes and dtypes.

    Values other than arrays, such as paths, are left out. `needed` names the arrays
    that every batch must hold.
    """

    def __init__(
        self, data: Iterator[Batch], mesh: Mesh | None, needed: set[str]
    ) -> None:
        self._data = data
        self._mesh = mesh
        self._needed = needed
        self._first: Batch | None = None
        self._before: dict[str, object] | None = None
        self._spec: dict[str, str] = {}
        self.ended = False

    def peek(self) -> Batch:
        """Returns the first batch, which the next `take` returns again."""
        if self._first is None:
            before = self.position()
            self._first = self.take()
            self._before = before
        if self._first is None:
            raise TrainingError("the data is empty: it yielded no batch")
        return self._first

    def take(self) -> Batch | None:
        """Returns the next batch on its devices, None after the last."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if jax.process_count() > 1:
            # Another process may not have a batch, and then this one goes back.
            self._before = self.position()
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

    def put_back(self, batch: Batch) -> None:
        """Takes a batch back, which the next `take` returns again.

        Under several processes only, which keep the position before each batch.
        """
        self._first = batch

    def check_resumable(self) -> None:
        """Raises a TypeError where the data's position cannot be saved."""
        if not isinstance(self._data, Resumable):
            raise TypeError(
                f"checkpoints need data with get_state() and set_state(), which "
                f"{type(self._data).__name__} lacks"
            )

    def position(self) -> dict[str, object] | None:
        """Returns the data's position for a checkpoint, None where it has none.

        A batch that was peeked at, or put back, comes after it.
        """
        if self._first is not None:
            return self._before
        return self._data.get_state() if isinstance(self._data, Resumable) else None

    def go_to(self, position: dict[str, object]) -> None:
        """Moves the data to a saved position and drops a batch that was peeked at."""
        # The peeked batch sized the new run's window; it is not part of this position.
        if isinstance(self._data, Resumable):
            self._data.set_state(position)
        self._first = None
        self.ended = False

    def _check(self, arrays: Mapping[str, Any]) -> None:
        missing = sorted(self._needed - set(arrays))
        if missing:
            raise ValueError(
                f"the batch lacks {', '.join(missing)}, which the objective reads; it "
                f"has {', '.join(sorted(arrays)) or 'no array'}"
            )
        now = {name: array_text(a) for name, a in arrays.items()}
        # Checked here, not left to JIT: another shape would compile the step again, in
        # silence, for every batch that has it.
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
