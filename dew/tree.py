"""The algebra of variables trees: paths, filters, splits and overlays.

A tree may hold mappings, tuples, lists, named tuples and any other PyTree node. What
takes a tree and returns one keeps the types of its nodes.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeAlias

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
    """Returns the leaves of a tree by path, in the tree's own order.

    An entry of a tuple or a list is named by its index, a field of a record by its
    name. Nodes without entries, such as `{}` and None, have no leaf.

    >>> flatten({"qk": {"max_logits": (1.0,)}, "params": {"dropout": {}}})
    {('qk', 'max_logits', '0'): 1.0}

    Raises:
        TypeError: a key of a mapping is not a string, so no path could name it.
    """
    leaves: Leaves = {}

    def walk(tree: Any, path: Path) -> None:
        node = _node(tree, path)
        if node is None:
            leaves[path] = tree
            return
        for name, child in node.children.items():
            walk(child, (*path, name))

    walk(tree, ())
    return leaves


def unflatten(leaves: Mapping[Path, object]) -> Tree:
    """Builds nested dicts of leaves by path; nodes of other types become dicts too."""
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


def path_of(keys: Sequence[Any]) -> Path:
    """Returns the path that jax's own keys of a leaf name."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def map_leaves(change: Callable[[Path, Any], object], tree: Variables) -> Variables:
    """Returns the tree with every leaf replaced by `change(path, leaf)`."""

    def walk(tree: Any, path: Path) -> Any:
        node = _node(tree, path)
        if node is None:
            return change(path, tree)
        children = {n: walk(child, (*path, n)) for n, child in node.children.items()}
        return node.rebuild(children)

    return walk(tree, ())


def array_text(leaf: Any) -> str:
    """Writes an array's dtype and shape as messages show them: `float32[2, 3]`.

    Checkpoints store this text too, so its form must not change.
    """
    return f"{_dtype(leaf).name}{list(np.shape(leaf))}"


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


def select(tree: Variables, keep: PathFilter) -> Variables:
    """Returns the subtree of the leaves that `keep` accepts, nested as before.

    A branch without an accepted leaf is dropped, so the result is what an EMA stores
    and what `merge` puts back. In a tuple, a list or a record, which would change its
    meaning without an entry, None takes the place of a dropped one.

    >>> select({"params": {"a": 1, "b": {"c": 2}}}, under("params", "b"))
    {'params': {'b': {'c': 2}}}
    >>> select({"params": [{"a": 1}, {"a": 2}]}, under("params", "1"))
    {'params': [None, {'a': 2}]}

    Raises:
        ValueError: `keep` accepts no leaf.
    """
    part = _part(tree, keep, with_empty=False)
    if part is _NOTHING:
        leaves = flatten(tree)
        raise ValueError(
            f"the filter selects none of the {len(leaves)} leaves; "
            f"paths look like {_examples(leaves)}"
        )
    return part


def merge(tree: Variables, overlay: Variables) -> Variables:
    """Returns `tree` with every leaf that `overlay` holds replaced by the overlay's.

    Its nodes are those of `tree`, empty ones included.

    >>> merge({"params": {"a": 1, "b": 2}}, {"params": {"b": 3}})
    {'params': {'a': 1, 'b': 3}}

    Raises:
        ValueError: the overlay has a path that the tree lacks, or a leaf of another
            shape or dtype; the message names them all.
    """
    old, new = flatten(tree), flatten(overlay)
    faults = []
    for path, leaf in new.items():
        if path not in old:
            faults.append(f"{slashed(path)} is not in the tree")
        # Another dtype would silently promote every result that the leaf enters, and
        # another shape might broadcast, so neither is accepted.
        elif _form(old[path]) != _form(leaf):
            faults.append(
                f"{slashed(path)} is {array_text(old[path])} in the tree and "
                f"{array_text(leaf)} in the overlay"
            )
    # Raised after the loop, so that one message lists every leaf that does not fit.
    if faults:
        raise ValueError("the overlay does not fit: " + "; ".join(faults))
    return map_leaves(lambda path, leaf: new.get(path, leaf), tree)


def freeze(variables: Variables, trainable: PathFilter) -> Variables:
    """Moves the `params` leaves that `trainable` rejects under `FROZEN`.

    Paths are full leaf paths, `("params", …)`. Leaves that were frozen already stay
    frozen, even where `trainable` accepts them. Modules without leaves stay.

    >>> freeze({"params": {"a": 1, "b": 2}}, under("params", "a"))
    {'params': {'a': 1}, 'frozen': {'b': 2}}

    Raises:
        ValueError: the filter keeps every leaf or none, which splits nothing.
    """
    # Frozen leaves are listed under "params" too: a filter is written for the tree that
    # the model sees, and must mean the same of a tree that has been split before.
    live = {"params": variables.get("params", {})}
    held = {"params": variables.get(FROZEN, {})}
    leaves = flatten(live)
    kept = [path for path in leaves if trainable(path)]
    if not kept or all(trainable(path) for path in {**leaves, **flatten(held)}):
        share = "none" if not kept else "every one"
        raise ValueError(
            f"trainable keeps {share} of the {len(leaves)} params leaves, so there is "
            f"nothing to freeze; paths look like {_examples(leaves)}"
        )
    trained = _part(live, trainable, with_empty=True)
    rejected = _part(live, lambda path: not trainable(path), with_empty=False)
    if rejected is not _NOTHING:
        held = _union(held, rejected) if flatten(held) else rejected
    return replaced(variables, {**trained, FROZEN: held["params"]})


def thaw(variables: Variables) -> Variables:
    """Undoes a frozen split, leaving one `params` collection; without one, a copy.

    >>> thaw({"params": {"a": 1}, "frozen": {"b": 2}})
    {'params': {'b': 2, 'a': 1}}
    """
    rest = without(variables, FROZEN)
    if FROZEN not in variables:
        return rest
    # Live leaves come second: where both collections have a path, the trained one wins.
    return replaced(
        rest, {"params": _union(variables[FROZEN], variables.get("params"))}
    )


def replaced(variables: Variables, collections: Mapping[str, Any]) -> Variables:
    """Returns the variables with whole collections added or replaced."""
    return _like(variables, {**variables, **collections})


def without(variables: Variables, *names: str) -> Variables:
    """Returns the variables without the collections of these names."""
    return _like(variables, {k: v for k, v in variables.items() if k not in names})


def cast(tree: Variables, dtype: DTypeLike) -> Variables:
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


class _Node(NamedTuple):
    """An inner node: its children by name, and how the node is built of others."""

    children: dict[str, Any]
    rebuild: Callable[[Mapping[str, Any]], Any]


def _node(tree: Any, path: Path) -> _Node | None:
    """Returns the top of a tree as a node, None where it is a leaf."""
    if isinstance(tree, np.ndarray | np.generic | jax.Array | int | float | complex):
        return None
    if isinstance(tree, Mapping):
        # A mapping keeps its own order, where jax would sort the keys.
        others = [name for name in tree if not isinstance(name, str)]
        if others:
            raise TypeError(
                f"keys of a tree must be strings, but {slashed(path) or 'it'}"
                f" has {', '.join(map(repr, others))}"
            )
        return _Node(dict(tree), lambda children: _like(tree, children))

    def is_child(part: Any) -> bool:
        return part is not tree

    parts, form = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_child)
    # jax lists a leaf as the only part of itself, under no key.
    if parts and not parts[0][0]:
        return None
    names = [path_of(keys)[0] for keys, _ in parts]
    children = dict(zip(names, (child for _, child in parts), strict=True))
    return _Node(children, lambda new: form.unflatten([new.get(n) for n in names]))


def _like(mapping: Mapping[str, Any], entries: Mapping[str, Any]) -> Any:
    """Returns the entries in a mapping of the same type."""
    if not isinstance(mapping, MutableMapping):
        make: Any = type(mapping)
        return make(entries)
    # A copy keeps what else a mapping holds, such as the factory of a defaultdict.
    new = copy(mapping)
    new.clear()
    new.update(entries)
    return new


_NOTHING = object()
"""What is left of a branch all of whose leaves were rejected."""


def _part(tree: Any, keep: PathFilter, *, with_empty: bool) -> Any:
    """Returns the tree of the accepted leaves, with or without its empty nodes."""

    def walk(tree: Any, path: Path) -> Any:
        node = _node(tree, path)
        if node is None:
            return tree if keep(path) else _NOTHING
        if not node.children:
            return tree if with_empty else _NOTHING
        parts = {n: walk(child, (*path, n)) for n, child in node.children.items()}
        kept = {n: part for n, part in parts.items() if part is not _NOTHING}
        return node.rebuild(kept) if kept else _NOTHING

    return walk(tree, ())


def _union(first: Any, second: Any) -> Any:
    """Returns the leaves of both trees, the second's where both have a path."""
    # None stands where one of the two was left without this branch.
    if first is None or second is None:
        return first if second is None else second
    one, other = _node(first, ()), _node(second, ())
    if one is None or other is None:
        return second
    names = {**one.children, **other.children}
    return other.rebuild(
        {n: _union(one.children.get(n), other.children.get(n)) for n in names}
    )


def _dtype(leaf: Any) -> Any:
    """Returns the leaf's dtype, which of a random key is not numpy's."""
    has_dtype = isinstance(leaf, np.ndarray | jax.Array | jax.ShapeDtypeStruct)
    return leaf.dtype if has_dtype else jax.numpy.result_type(leaf)


def _form(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and the dtype that a leaf has, or will have, on a device."""
    dtype = jax.dtypes.canonicalize_dtype(_dtype(leaf), allow_extended_dtype=True)
    return np.shape(leaf), dtype


def _examples(leaves: Leaves) -> str:
    return ", ".join(slashed(path) for path in list(leaves)[:3]) or "nothing at all"
