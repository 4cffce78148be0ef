"""Sharding: a named mesh of devices, and rules from leaf paths to mesh axes.

The step is compiled once over global arrays; GSPMD derives the collectives from the
shardings of its operands.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from dew.batch import arrays_of, row_counts, with_arrays
from dew.tree import slashed
from dew.typing import Batch, Path

AXES = ("data", "fsdp", "tensor")
"""Rows are split over `data` and `fsdp`, weights over `fsdp` and `tensor`."""

Rules: TypeAlias = Sequence[tuple[str, tuple[str | None, ...]]]
"""Pairs of a regular expression on a slashed path and an axis for each dimension."""

DECODER_RULES: Rules = (
    (r"(embed|head)/weight$", ("tensor", "fsdp")),
    (r"attn/[qkv]/weight$", ("tensor", None, "fsdp")),
    (r"attn/[qkv]/bias$", ("tensor", None)),
    (r"attn/o/weight$", ("fsdp", "tensor", None)),
    (r"mlp/(gate|up)/weight$", ("tensor", "fsdp")),
    (r"mlp/(gate|up)/bias$", ("tensor",)),
    (r"mlp/down/weight$", ("fsdp", "tensor")),
)
"""Rules of the native decoder: Megatron's split, which needs one sum per sublayer.

Shoeybi et al., "Megatron-LM" (2019), section 3: the first matrix of a sublayer is split
by its outputs and the second by its inputs.
"""

SMALL = 2**12
"""Leaves without a rule are replicated below this many elements."""


def make_mesh(
    *,
    data: int = 1,
    fsdp: int | None = None,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Returns a mesh over all devices, or over `devices`.

    `fsdp` is the number of devices over `data * tensor` where None.

    Raises:
        ValueError: the axes do not multiply to the number of devices.

    >>> import jax
    >>> mesh = make_mesh(tensor=2, devices=jax.devices()[:8])
    >>> dict(mesh.shape)
    {'data': 1, 'fsdp': 4, 'tensor': 2}
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    rest = count // (data * tensor) if fsdp is None else fsdp
    if data * rest * tensor != count:
        raise ValueError(
            f"the axes data={data}, fsdp={rest}, tensor={tensor} make "
            f"{data * rest * tensor} devices, but there are {count}"
        )
    return Mesh(np.asarray(devices).reshape(data, rest, tensor), AXES)


Placement: TypeAlias = Callable[[Path, tuple[int, ...]], NamedSharding]
"""Sharding of a variable by its path and shape, as the loaders take it."""


def placement(mesh: Mesh, rules: Rules = DECODER_RULES) -> Placement:
    """Returns the sharding that each variable has in training, for loading it there.

    >>> import jax
    >>> place = placement(make_mesh(devices=jax.devices()[:8]))
    >>> place(("params", "embed", "weight"), (64, 48)).spec
    P('tensor', 'fsdp')
    """

    def sharding(path: Path, shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(mesh, _spec(slashed(path), shape, mesh, rules))

    return sharding


def shardings_of(
    tree: PyTree, mesh: Mesh, rules: Rules = DECODER_RULES
) -> PyTree[NamedSharding]:
    """Returns a sharding for every leaf of a tree of arrays or shapes.

    The first rule whose pattern occurs in a leaf's path applies, so that an optimizer's
    moments are placed as their weights. A mesh axis whose size does not divide a
    dimension is left out. Leaves without a rule are split over `fsdp` along the largest
    dimension that it divides, or replicated below `SMALL` elements.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, _spec(name, tuple(leaf.shape), mesh, rules))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _spec(name: str, shape: tuple[int, ...], mesh: Mesh, rules: Rules) -> PartitionSpec:
    for pattern, axes in rules:
        if len(axes) == len(shape) and re.search(pattern, name):
            fits = (
                axis if axis and size % mesh.shape[axis] == 0 else None
                for axis, size in zip(axes, shape, strict=True)
            )
            return PartitionSpec(*fits)
    ways = mesh.shape["fsdp"]
    divisible = [size for size in shape if size % ways == 0]
    if not divisible or int(np.prod(shape)) < SMALL:
        return PartitionSpec()
    widest = shape.index(max(divisible))
    return PartitionSpec(*("fsdp" if i == widest else None for i in range(len(shape))))


def place_batch(batch: Batch, mesh: Mesh) -> dict[str, Any]:
    """Makes global arrays of this process's rows, split over `data` and `fsdp`.

    Numbers and arrays without axes, which are to be the same in every process, are
    replicated. What stays on the host is left in its place.

    Raises:
        ValueError: the global number of rows is not a multiple of those axes.
    """
    arrays = arrays_of(batch)
    faults = row_faults(arrays, mesh)
    if faults:
        raise ValueError("; ".join(faults))
    placed = jax.tree.map(lambda array: _place(array, mesh), arrays)
    return with_arrays(batch, placed)


def row_faults(arrays: Batch, mesh: Mesh) -> list[str]:
    """Lists what keeps a batch's arrays from being split over a mesh, if anything."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    processes = len({d.process_index for d in mesh.devices.flat})
    rows = {name: count * processes for name, count in row_counts(arrays).items()}
    uneven = [f"{name} has {n} rows" for name, n in rows.items() if n % ways]
    if not uneven:
        return []
    return [
        f"a batch's rows must be a multiple of {ways} (the mesh's data * fsdp): "
        + ", ".join(uneven)
    ]


def _place(array: Any, mesh: Mesh) -> jax.Array:
    """Makes a global array of this process's rows, or of a number."""
    sharding = NamedSharding(
        mesh, PartitionSpec(("data", "fsdp")) if array.ndim else PartitionSpec()
    )
    if not jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.make_array_from_process_local_data(sharding, np.asarray(array))
    numbers = np.asarray(jax.random.key_data(array))
    placed = jax.make_array_from_process_local_data(sharding, numbers)
    return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(array))
