"""Leaves that a run holds and never moves: which they are, and hashes of their content.

A collection is held where the objective declares it in `held`, or where neither the
optimizer, which moves `params` alone, nor any report of the loss replaces it.
"""

import hashlib
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dew.objectives.base import AnyObjective, Aux, Initializer, Step
from dew.tree import array_text, flatten, slashed
from dew.typing import Batch, Path, Variables


def moved_collections(
    objective: AnyObjective, variables: Variables, aux: Aux[Any]
) -> frozenset[str]:
    """Returns the collections that a loss's reports replace, at once or at a commit.

    Shapes are enough of both trees.
    """
    moved = set(aux.variables or ())
    if aux.effects is not None:
        moved |= set(jax.eval_shape(objective.apply_effects, variables, aux.effects))
    return frozenset(moved)


def held_collections(
    objective: AnyObjective, variables: Variables, batch: Batch | None
) -> frozenset[str]:
    """Returns the collections beside `params` that no step moves.

    Without an example batch, whose shapes are enough, those that the objective declares
    are all that is known.
    """
    declared = frozenset(objective.held)
    others = frozenset(variables) - declared - {"params"}
    if batch is None or not others:
        return declared

    def reports(variables: Variables, batch: Batch) -> Aux[Any]:
        ema = None if objective.ema is None else variables
        step = Step(jnp.zeros((), jnp.int32), jax.random.key(0), ema)
        return objective.loss(variables, batch, step)[1]

    aux = jax.eval_shape(reports, dict(variables), dict(batch))
    return declared | (others - moved_collections(objective, variables, aux))


def supplied_paths(initializer: Initializer) -> frozenset[Path]:
    """Returns the paths of the held variables that an initializer passes to `init`.

    They are its argument, so that `held_variables` is not read again.
    """
    return frozenset(flatten(initializer.keywords.get("variables") or {}))


def held_paths(
    objective: AnyObjective,
    supplied: Collection[Path],
    variables: Variables,
    batch: Batch | None,
) -> frozenset[Path]:
    """Returns the paths of the held leaves of a run that the objective supplies.

    A checkpoint need not hold them. `supplied` are the paths of its held variables.
    """
    if not supplied:
        return frozenset()
    held = held_collections(objective, variables, batch)

    def is_supplied(path: Path) -> bool:
        # Leaves supplied under `params` may be held in a collection of their own.
        return path in supplied or ("params", *path[1:]) in supplied

    paths = flatten(variables)
    return frozenset(p for p in paths if p[0] in held and is_supplied(p))


def held_hashes(variables: Variables, paths: Iterable[Path]) -> dict[str, str]:
    """Returns the SHA-256 of each leaf at `paths`, by its name in a checkpoint.

    Leaves are brought to the host and hashed one at a time, as the run uses them.
    """
    leaves = flatten(variables)
    # Sorted, because processes must gather the parts of the same leaf at a time, and
    # each has its own order of a set.
    ordered = sorted(paths)
    return {f"variables/{slashed(path)}": leaf_hash(leaves[path]) for path in ordered}


def leaf_hash(leaf: Any) -> str:
    """Returns the SHA-256 of a leaf's dtype, shape and bytes, as 64 hex digits.

    Of an array that is split over processes, all of them must ask together.
    """
    array = np.ascontiguousarray(_on_host(leaf))
    digest = hashlib.sha256(array_text(array).encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _on_host(leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(leaf, tiled=True)
    # Of a copy, because an array keeps its values on the host once they were read, and
    # all leaves together would be a second model there.
    return np.asarray(jnp.copy(leaf))
