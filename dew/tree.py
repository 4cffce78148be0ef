"""The algebra of variables trees: paths, filters, splits and overlays."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from dew.typing import Path, PathFilter, Variables

FROZEN = "frozen"
"""The collection in which a partially trained run keeps its frozen weights."""

Tree: TypeAlias = dict[str, Any]
"""Nested dicts with leaves of any type: what functions of variables trees return."""

Leaves: TypeAlias = dict[Path, Any]
"""The leaves of a tree by path."""


def flatten(tree: Variables) -> Leaves:
    """Returns the leaves of nested mappings by path, in the tree's own order."""
    leaves: Leaves = {}

    def walk(node: Any, path: Path) -> None:
        if isinstance(node, Mapping):
            for name, child in node.items():
                walk(child, (*path, name))
        else:
            leaves[path] = node

    walk(tree, ())
    return leaves


def unflatten(leaves: Mapping[Path, object]) -> Tree:
    """Builds the nested dicts of which `leaves` are the flat form."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def slashed(path: Path) -> str:
    """Writes a path the way errors and tables show it: `params/layers/0/attn/q`."""
    return "/".join(path)


def map_leaves(change: Callable[[Path, Any], object], tree: Variables) -> Tree:
    """Returns the tree with every leaf replaced by `change(path, leaf)`."""
    return unflatten({path: change(path, leaf) for path, leaf in flatten(tree).items()})


def array_text(leaf: Any) -> str:
    """Writes an array's dtype and shape as messages show them: `float32[2, 3]`.

    Checkpoints store this text too, so its form must not change.
    """
    has_dtype = isinstance(leaf, np.ndarray | jax.Array | jax.ShapeDtypeStruct)
    dtype = leaf.dtype if has_dtype else jax.numpy.result_type(leaf)
    return f"{dtype.name}{list(np.shape(leaf))}"


def everything(path: Path) -> bool:
    """Accepts every leaf; the filter of an average over all variables."""
    return True


def under(*prefix: str) -> PathFilter:
    """Builds a filter that accepts the leaves below `prefix`.

    >>> encoder = under("params", "context_encoder")
    >>> encoder(("params", "context_encoder", "kernel")), encoder(("params", "head"))
    (True, False)
    """

    def is_below(path: Path) -> bool:
        return path[: len(prefix)] == prefix

    return is_below


def select(tree: Variables, keep: PathFilter) -> Tree:
    """Returns the subtree of the leaves that `keep` accepts, nested as before.

    A branch without an accepted leaf is dropped, so the result is what an EMA stores
    and what `merge` puts back.

    >>> select({"params": {"a": 1, "b": {"c": 2}}}, under("params", "b"))
    {'params': {'b': {'c': 2}}}

    Raises:
        ValueError: `keep` accepts no leaf.
    """
    leaves = flatten(tree)
    accepted = {path: leaf for path, leaf in leaves.items() if keep(path)}
    if not accepted:
        raise ValueError(
            f"the filter selects none of the {len(leaves)} leaves; "
            f"paths look like {_examples(leaves)}"
        )
    return unflatten(accepted)


def merge(tree: Variables, overlay: Variables) -> Tree:
    """Returns `tree` with every leaf that `overlay` holds replaced by the overlay's.

    >>> merge({"params": {"a": 1, "b": 2}}, {"params": {"b": 3}})
    {'params': {'a': 1, 'b': 3}}

    Raises:
        ValueError: the overlay has a path that the tree lacks, or a leaf of another
            shape or dtype; the message names them all.
    """
    leaves = flatten(tree)
    faults = []
    for path, new in flatten(overlay).items():
        if path not in leaves:
            faults.append(f"{slashed(path)} is not in the tree")
            continue
        old = leaves[path]
        # Another dtype would silently promote every result that the leaf enters, and
        # another shape might broadcast, so neither is accepted.
        if (np.shape(old), _dtype(old)) != (np.shape(new), _dtype(new)):
            faults.append(
                f"{slashed(path)} is {array_text(old)} in the tree and "
                f"{array_text(new)} in the overlay"
            )
        leaves[path] = new
    # Raised after the loop, so that one message lists every leaf that does not fit.
    if faults:
        raise ValueError("the overlay does not fit: " + "; ".join(faults))
    return unflatten(leaves)


def freeze(variables: Variables, trainable: PathFilter) -> Tree:
    """Moves the `params` leaves that `trainable` rejects under `FROZEN`.

    Paths are full leaf paths, `("params", …)`. Leaves that were frozen already stay
    frozen, even where `trainable` accepts them.

    >>> freeze({"params": {"a": 1, "b": 2}}, under("params", "a"))
    {'params': {'a': 1}, 'frozen': {'b': 2}}

    Raises:
        ValueError: the filter keeps every leaf or none, which splits nothing.
    """
    # Frozen leaves are listed under "params" too: a filter is written for the tree that
    # the model sees, and must mean the same of a tree that has been split before.
    leaves = flatten({"params": variables.get("params", {})})
    live = {path: leaf for path, leaf in leaves.items() if trainable(path)}
    frozen = flatten({"params": variables.get(FROZEN, {})})
    if not live or all(trainable(path) for path in {**leaves, **frozen}):
        share = "none" if not live else "every one"
        raise ValueError(
            f"trainable keeps {share} of the {len(leaves)} params leaves, so there is "
            f"nothing to freeze; paths look like {_examples(leaves)}"
        )
    frozen |= {path: leaf for path, leaf in leaves.items() if path not in live}
    rest = {k: v for k, v in variables.items() if k not in ("params", FROZEN)}
    return {**rest, **unflatten(live), FROZEN: unflatten(frozen)["params"]}


def thaw(variables: Variables) -> Tree:
    """Undoes a frozen split, leaving one `params` collection; without one, a copy.

    >>> thaw({"params": {"a": 1}, "frozen": {"b": 2}})
    {'params': {'b': 2, 'a': 1}}
    """
    if FROZEN not in variables:
        return dict(variables)
    leaves = flatten({"params": variables[FROZEN]})
    # Live leaves come second: where both collections have a path, the trained one wins.
    leaves |= flatten({"params": variables.get("params", {})})
    rest = {k: v for k, v in variables.items() if k not in ("params", FROZEN)}
    return {**rest, **unflatten(leaves)}


def cast(tree: Variables, dtype: DTypeLike) -> Tree:
    """Returns the tree with its floating leaves in `dtype`; others stay as they are."""

    def change(path: Path, leaf: Any) -> Any:
        is_float = jax.numpy.issubdtype(_dtype(leaf), np.floating)
        return leaf.astype(dtype) if is_float and leaf.dtype != dtype else leaf

    return map_leaves(change, tree)


def widen(leaf: ArrayLike) -> jax.Array:
    """The leaf as an array of float32, or of its own floating dtype if it is wider."""
    array = jax.numpy.asarray(leaf)
    inexact = jax.numpy.issubdtype(array.dtype, np.inexact)
    keep = inexact and array.dtype.itemsize >= 4
    return array.astype(array.dtype if keep else np.float32)


def _dtype(leaf: Any) -> np.dtype:
    return np.dtype(jax.numpy.result_type(leaf))


def _examples(leaves: Leaves) -> str:
    return ", ".join(slashed(path) for path in list(leaves)[:3]) or "nothing at all"
