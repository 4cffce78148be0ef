"""Batches for the training step: checked, stripped to arrays, placed on devices."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from dew.batch import array_texts, arrays_of, host_values, row_counts
from dew.objectives.base import InputSpec
from dew.training.logs import TrainingError, tell
from dew.training.sharding import place_batch, row_faults
from dew.tree import array_text, flatten, slashed
from dew.typing import Batch, Path


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

    `inputs` are the shapes and dtypes of one example of what every batch must hold, and
    `vocabulary_rows` is the number of ids that `tokens` may have, None for any.
    Values that stay on the host, such as paths, are no part of what a loss is compiled
    for; they are left out here, and named on stderr once a run.
    """

    def __init__(
        self,
        data: Iterator[Batch],
        mesh: Mesh | None,
        inputs: InputSpec,
        *,
        vocabulary_rows: int | None = None,
    ) -> None:
        self._data = data
        self._mesh = mesh
        self._inputs = inputs
        self._vocabulary_rows = vocabulary_rows
        self._left_out: set[Path] = set()
        self._structure: Any = None
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
        arrays = arrays_of(batch)
        self._check(batch, arrays)
        self._tell_left_out(batch)
        if self._mesh is not None:
            return place_batch(arrays, self._mesh)
        return jax.tree.map(jax.numpy.asarray, arrays)

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

    def _tell_left_out(self, batch: Batch) -> None:
        """Names what stays on the host, where it was not named before."""
        new = {p: x for p, x in host_values(batch).items() if p not in self._left_out}
        if not new:
            return
        self._left_out |= set(new)
        named = ", ".join(f"{slashed(p)} ({type(x).__name__})" for p, x in new.items())
        tell(
            f"what stays on the host of each batch: {named}; the loss does not see it, "
            "evaluate and preview do"
        )

    def _check(self, batch: Batch, arrays: Batch) -> None:
        now = array_texts(arrays)
        if not self._spec:
            self._check_first(batch, arrays)
            self._spec, self._structure = now, jax.tree.structure(arrays)
            return
        # Checked here, not left to JIT: another shape would compile the step again, in
        # silence, for every batch that has it.
        first = self._spec
        faults = [
            f"{name} was {first.get(name, 'absent')}, is {now.get(name, 'absent')}"
            for name in sorted({*first, *now})
            if first.get(name) != now.get(name)
        ]
        if not faults and jax.tree.structure(arrays) != self._structure:
            faults = ["the same arrays are held by lists or tuples of other kinds"]
        if faults:
            raise ValueError(
                "every batch must look like the first, or the step would be compiled "
                "again: " + "; ".join(faults)
            )

    def _check_first(self, batch: Batch, arrays: Batch) -> None:
        """Raises where the first batch is not what the objective or the mesh takes."""
        faults = _input_faults(self._inputs, batch, arrays)
        faults += _id_faults(batch, self._vocabulary_rows)
        rows = row_counts(arrays)
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{name} has {count}" for name, count in rows.items())
            faults.append(f"arrays of one batch must have as many rows: {counts}")
        elif self._mesh is not None:
            faults += row_faults(arrays, self._mesh)
        if faults:
            raise ValueError("; ".join(faults))


def _id_faults(batch: Batch, rows: int | None) -> list[str]:
    """Returns a message where `tokens` are no rows of the token table.

    A model would read such an id as NaN, or count a negative one from the end.
    """
    tokens = batch.get("tokens")
    if rows is None or not isinstance(tokens, np.ndarray | jax.Array):
        return []
    # Entries behind a mask may hold anything: they are replaced before they are read.
    real = np.ones(tokens.shape, bool)
    if "mask" in batch:
        real = np.asarray(batch["mask"], bool)
    elif "segment_ids" in batch:
        real = np.asarray(batch["segment_ids"]) > 0
    ids = np.asarray(tokens)[real] if real.shape == tokens.shape else np.asarray(tokens)
    low, high = int(np.min(ids, initial=0)), int(np.max(ids, initial=0))
    if low >= 0 and high < rows:
        return []
    return [
        f"tokens must be ids in [0, {rows - 1}], the rows of the token table, got ids "
        f"in [{low}, {high}]: mask padding by `mask` and not by an id, or add rows "
        "(dew extend)"
    ]


def _input_faults(inputs: InputSpec, batch: Batch, arrays: Batch) -> list[str]:
    """Lists the inputs of an objective that a batch lacks or holds in another form."""
    leaves, host = flatten(arrays), host_values(batch)
    wanted = flatten(inputs)
    missing = [
        slashed(path) + (" (it stays on the host)" if path in host else "")
        for path in wanted
        if path not in leaves
    ]
    faults = []
    if missing:
        faults.append(
            f"the batch lacks {', '.join(missing)}, which the objective reads; it has "
            f"{', '.join(map(slashed, leaves)) or 'no array'}"
        )
    for path, spec in wanted.items():
        if path in leaves and not _fits(leaves[path], spec):
            dtype = jax.numpy.dtype(spec.dtype).name
            faults.append(
                f"{slashed(path)} of the batch is {array_text(leaves[path])}, but the "
                f"objective reads {dtype}[rows{''.join(f', {n}' for n in spec.shape)}]"
            )
    return faults


def _fits(array: Any, spec: jax.ShapeDtypeStruct) -> bool:
    """Whether an array has rows of a shape, of whole or of fractional numbers alike.

    There may be further axes between, as for several views of an example.
    """
    last = array.shape[1:][-len(spec.shape) :] if spec.shape else ()
    kinds = [jax.numpy.issubdtype(x.dtype, np.inexact) for x in (array, spec)]
    return array.ndim > 0 and last == tuple(spec.shape) and kinds[0] == kinds[1]
