"""Evaluation batches of several processes, brought to one size where they differ.

Each process reads its part of a validation set, and parts may differ: in the number of
batches, and in the rows of one. Every process must take part in every computation, so
the smaller parts are padded, and what is scored of the padding is dropped.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from dew.typing import Batch

Form: TypeAlias = dict[str, Any]
"""Of a batch: its `rows`, and by name the dtype and row shape of each array."""


def describe(batch: Batch | None) -> str:
    """Returns the form of a process's batch as JSON, nothing where it has none.

    Raises:
        ValueError: arrays of the batch have different numbers of rows.
    """
    if batch is None:
        return ""
    arrays = {n: x for n, x in batch.items() if _has_rows(x)}
    rows = {name: len(array) for name, array in arrays.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"arrays of a batch differ in their rows: {rows}")
    form = {name: [str(x.dtype), list(x.shape[1:])] for name, x in arrays.items()}
    return json.dumps({"rows": max(rows.values(), default=0), "arrays": form})


def align(
    batch: Batch | None, messages: Sequence[str]
) -> tuple[Batch | None, np.ndarray | None]:
    """Returns this process's batch as large as the others', and which rows are real.

    Args:
        batch: this process's; None where its part has ended.
        messages: what `describe` gave in each process, in their order.

    Returns:
        The batch, None where all parts have ended; and a flag for each global row, or
        None where nothing was padded.

    Raises:
        ValueError: arrays of the processes differ in more than their rows.
    """
    forms: list[Form | None] = [
        json.loads(message) if message else None for message in messages
    ]
    present = [form for form in forms if form is not None]
    if not present:
        return None, None
    _check_same(forms)
    rows = [0 if form is None else form["rows"] for form in forms]
    most = max(rows)
    if min(rows) == most:
        return batch, None
    is_real = np.concatenate([np.arange(most) < count for count in rows])
    return _padded(batch or {}, present[0]["arrays"], most), is_real


def drop_padding(artifact: Any, is_real: np.ndarray | None) -> Any:
    """Returns an artifact's arrays without the rows of padding.

    Raises:
        ValueError: an array of the artifact has no rows, so that it holds the padding's
            share as well.
    """
    if is_real is None:
        return artifact

    def real_rows(path: Any, leaf: Any) -> Any:
        if np.shape(leaf)[:1] != is_real.shape:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                "parts of a validation set may differ between processes only where "
                f"what is scored has a row for each of the batch's, but {name} of "
                f"{type(artifact).__name__} has the shape {np.shape(leaf)} for "
                f"{len(is_real)} rows: give every process as many rows"
            )
        return leaf[is_real]

    return jax.tree_util.tree_map_with_path(real_rows, artifact)


def _has_rows(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array) and value.ndim > 0


def _check_same(forms: Sequence[Form | None]) -> None:
    texts = {
        i: ", ".join(f"{n} {d}{s}" for n, (d, s) in sorted(form["arrays"].items()))
        for i, form in enumerate(forms)
        if form is not None
    }
    if len(set(texts.values())) > 1:
        raise ValueError(
            "the batches of a validation set differ between processes in more than "
            "their rows: "
            + "; ".join(f"process {i} has {text}" for i, text in texts.items())
        )


def _padded(batch: Batch, arrays: Mapping[str, Any], rows: int) -> Batch:
    """Repeats a batch's last row until it has so many, or fills them with zeros."""

    def padded(name: str) -> Any:
        dtype, row = arrays[name]
        array = np.asarray(batch.get(name, np.zeros((0, *row), np.dtype(dtype))))
        missing = rows - len(array)
        fill = array[-1:] if len(array) else np.zeros((1, *row), array.dtype)
        return np.concatenate([array, np.repeat(fill, missing, axis=0)])

    return {**batch, **{name: padded(name) for name in arrays}}
