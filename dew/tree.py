"""The algebra of variables trees: paths, filters, splits and overlays."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dew.typing import Path, PathFilter, Variables

FROZEN = "frozen"
"""The collection a partially trained run keeps its held weights under."""


def flatten(tree: Variables) -> dict[Path, Any]:
    """Returns the leaves of nested mappings by path, in the tree's own order."""
    leaves: dict[Path, Any] = {}

    def walk(node: Any, path: Path) -> None:
        if isinstance(node, Mapping):
            for name, child in node.items():
                walk(child, (*path, name))
        else:
            leaves[path] = node

    walk(tree, ())
    return leaves


def unflatten(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """Builds the nested dicts of which `leaves` are the flat form."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def slashed(path: Path) -> str:
    """Writes a path the way errors and tables show it: `params/layers/0/attn/q`."""
    return "/".join(path)


def map_leaves(change: Callable[[Path, Any], Any], tree: Variables) -> dict[str, Any]:
    """Returns the tree with every leaf replaced by `change(path, leaf)`."""
    return unflatten({path: change(path, leaf) for path, leaf in flatten(tree).items()})


def everything(path: Path) -> bool:
    """Accepts every leaf."""
    return True


def under(*prefix: str) -> PathFilter:
    """Builds a filter that accepts the leaves below `prefix`.

    As in `under("params", "context_encoder")`.
    """

    def below(path: Path) -> bool:
        return path[: len(prefix)] == prefix

    return below


def select(tree: Variables, keep: PathFilter) -> dict[str, Any]:
    """Returns the subtree of the leaves that `keep` accepts, nested as before.

    A branch that keeps no leaf is dropped, so the result is what an EMA stores and what
    `merge` puts back.

    Raises:
        ValueError: `keep` accepts no leaf.
    """
    leaves = flatten(tree)
    kept = {path: leaf for path, leaf in leaves.items() if keep(path)}
    if not kept:
        raise ValueError(
            f"the filter selects none of the {len(leaves)} leaves; "
            f"paths look like {_examples(leaves)}"
        )
    return unflatten(kept)


def merge(tree: Variables, overlay: Variables) -> dict[str, Any]:
    """Returns `tree` with every leaf that `overlay` holds replaced by the overlay's.

    Raises:
        ValueError: the overlay holds a path that the tree lacks, or a leaf of another
            shape or dtype; all of them are named.
    """
    leaves = flatten(tree)
    faults = []
    for path, new in flatten(overlay).items():
        if path not in leaves:
            faults.append(f"{slashed(path)} is not in the tree")
            continue
        old = leaves[path]
        if (np.shape(old), _dtype(old)) != (np.shape(new), _dtype(new)):
            faults.append(
                f"{slashed(path)} is {_kind(old)} in the tree and {_kind(new)} in the "
                "overlay"
            )
        leaves[path] = new
    if faults:
        raise ValueError("the overlay does not fit: " + "; ".join(faults))
    return unflatten(leaves)


def freeze(variables: Variables, trainable: PathFilter) -> dict[str, Any]:
    """Moves the `params` leaves that `trainable` rejects under `FROZEN`.

    Paths are full leaf paths, `("params", …)`. What was frozen already stays so, even
    where `trainable` accepts it.

    Raises:
        ValueError: the filter keeps every leaf or none, which splits nothing.
    """
    leaves = flatten({"params": variables.get("params", {})})
    live = {path: leaf for path, leaf in leaves.items() if trainable(path)}
    held = flatten({"params": variables.get(FROZEN, {})})
    if not live or all(trainable(path) for path in {**leaves, **held}):
        kept = "none" if not live else "every one"
        raise ValueError(
            f"trainable keeps {kept} of the {len(leaves)} params leaves, so there is "
            f"nothing to freeze; paths look like {_examples(leaves)}"
        )
    held |= {path: leaf for path, leaf in leaves.items() if path not in live}
    rest = {k: v for k, v in variables.items() if k not in ("params", FROZEN)}
    return {**rest, **unflatten(live), FROZEN: unflatten(held)["params"]}


def thaw(variables: Variables) -> dict[str, Any]:
    """Undoes a frozen split, leaving one `params` collection; without one, a copy."""
    if FROZEN not in variables:
        return dict(variables)
    leaves = flatten({"params": variables[FROZEN]})
    leaves |= flatten({"params": variables.get("params", {})})
    rest = {k: v for k, v in variables.items() if k not in ("params", FROZEN)}
    return {**rest, **unflatten(leaves)}


def cast(tree: Variables, dtype: Any) -> dict[str, Any]:
    """Returns the tree with its floating leaves in `dtype`; others stay as they are."""

    def change(path: Path, leaf: Any) -> Any:
        is_float = jax.numpy.issubdtype(_dtype(leaf), np.floating)
        return leaf.astype(dtype) if is_float and leaf.dtype != dtype else leaf

    return map_leaves(change, tree)


def wide(leaf: Any) -> jax.Array:
    """The leaf as an array of float32, or of its own floating dtype if it is wider."""
    array = jax.numpy.asarray(leaf)
    inexact = jax.numpy.issubdtype(array.dtype, np.inexact)
    keep = inexact and array.dtype.itemsize >= 4
    return array.astype(array.dtype if keep else np.float32)


def _dtype(leaf: Any) -> np.dtype:
    return np.dtype(jax.numpy.result_type(leaf))


def _kind(leaf: Any) -> str:
    return f"{_dtype(leaf)}{list(np.shape(leaf))}"


def _examples(leaves: Mapping[Path, Any]) -> str:
    return ", ".join(slashed(path) for path in list(leaves)[:3]) or "nothing at all"
