"""The parts of a batch: arrays for the devices, and values that stay on the host.

A batch is a tree. Arrays go to the devices, and so do numbers, as arrays without axes:
bool, int32 and float32, or 64 bits where jax has those enabled. Strings, bytes, paths,
None, arrays of such, and any other object stay on the host. A mapping is divided by
its keys; a list or tuple is divided nowhere: with one value for the host in it, all of
it is for the host, as a list of records.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dew.tree import array_text, flatten, path_of, slashed
from dew.typing import Batch, Path

_NUMBERS = "biufc"
"""Kinds of numpy dtypes that a device has; ml_dtypes' own are of kind V."""


def arrays_of(batch: Batch) -> dict[str, Any]:
    """Returns the tree of a batch's arrays and numbers, which a JIT can take.

    Branches without any are left out.

    >>> arrays_of({"x": np.ones(2), "count": 3, "meta": {"path": "a.txt"}})
    {'x': array([1., 1.]), 'count': array(3, dtype=int32)}

    Raises:
        OverflowError: an integer needs more bits than the devices have for it.
    """
    part = _arrays(batch, ())
    return {} if part is None else part


def host_values(batch: Batch) -> dict[Path, Any]:
    """Returns what of a batch stays on the host, by path.

    >>> host_values({"x": np.ones(2), "meta": {"path": "a.txt"}})
    {('meta', 'path'): 'a.txt'}
    """
    values: dict[Path, Any] = {}

    def walk(part: Any, path: Path) -> None:
        if isinstance(part, Mapping):
            for name, child in part.items():
                walk(child, (*path, str(name)))
        elif not _is_for_devices(part):
            values[path] = part

    walk(batch, ())
    return values


def with_arrays(batch: Batch, arrays: Batch) -> dict[str, Any]:
    """Returns the batch with `arrays`, of the form of `arrays_of`, in their places."""

    def walk(part: Any, new: Any) -> Any:
        if isinstance(part, Mapping):
            news = new if isinstance(new, Mapping) else {}
            return {name: walk(child, news.get(name)) for name, child in part.items()}
        return new if _is_for_devices(part) else part

    return walk(batch, arrays)


def array_texts(arrays: Batch) -> dict[str, str]:
    """Returns dtype and shape of every array of a batch, by its path."""
    return {slashed(path): array_text(leaf) for path, leaf in flatten(arrays).items()}


def row_counts(arrays: Batch) -> dict[str, int]:
    """Returns the number of rows of every array of a batch that has an axis."""
    leaves = flatten(arrays).items()
    return {slashed(path): x.shape[0] for path, x in leaves if np.ndim(x)}


def _arrays(part: Any, path: Path) -> Any:
    """Returns the arrays below a branch of a batch, None where there are none."""
    if isinstance(part, Mapping):
        parts = {n: _arrays(child, (*path, str(n))) for n, child in part.items()}
        return {n: x for n, x in parts.items() if x is not None} or None
    if not _is_for_devices(part):
        return None
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: _array((*path, *path_of(keys)), leaf), part
    )


def _array(path: Path, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | jax.Array):
        return leaf
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(np.result_type(type(leaf)))
    try:
        return np.asarray(leaf, dtype)
    except OverflowError as fault:
        raise OverflowError(
            f"{slashed(path)} of the batch is {leaf}, which {dtype} does not hold; "
            "give an array of another dtype, or a string to keep it on the host"
        ) from fault


def _is_for_devices(part: Any) -> bool:
    """Whether all of a branch is arrays and numbers, and something is there."""
    leaves = jax.tree.leaves(part, is_leaf=lambda x: x is None)
    return bool(leaves) and all(map(_is_number, leaves))


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        is_narrow = jax.numpy.issubdtype(leaf.dtype, np.number)
        return leaf.dtype.kind in _NUMBERS or is_narrow
    return isinstance(leaf, jax.Array | bool | int | float | complex)
