"""Where each array lives: a named mesh, and rules from paths to its axes.

GSPMD does the rest: the step is compiled once over global arrays, and the collectives
follow from where its operands live.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dew.typing import Batch

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
"""The native decoder's. Megatron's split: columns in, rows out, one sum a layer."""

SMALL = 2**12
"""Leaves without a rule are split over `fsdp` from this many elements up."""


def make_mesh(
    *,
    data: int = 1,
    fsdp: int | None = None,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Returns a mesh over all devices, or over those given.

    `fsdp` takes what the other axes leave where None.

    Raises:
        ValueError: the axes do not multiply to the number of devices.
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


def shardings_of(tree: Any, mesh: Mesh, rules: Rules = DECODER_RULES) -> Any:
    """Returns a sharding for every leaf of a tree of arrays or shapes.

    The first rule whose pattern is found in a leaf's path decides, so that an
    optimizer's moments follow their weights. An axis that does not divide its dimension
    is left out. Leaves without a rule are split over `fsdp` along their largest
    dimension that divides, if they are large.
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
    able = [size for size in shape if size % ways == 0]
    if not able or int(np.prod(shape)) < SMALL:
        return PartitionSpec()
    widest = shape.index(max(able))
    return PartitionSpec(*("fsdp" if i == widest else None for i in range(len(shape))))


def place_batch(batch: Batch, mesh: Mesh) -> dict[str, jax.Array]:
    """Puts this process's rows of a batch on the mesh, split over `data` and `fsdp`.

    Raises:
        ValueError: the global number of rows is not a multiple of those axes.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    count = len({d.process_index for d in mesh.devices.flat})
    faults = [
        f"{name} has {len(array) * count} rows"
        for name, array in batch.items()
        if len(array) * count % ways
    ]
    if faults:
        raise ValueError(
            f"a batch's rows must be a multiple of {ways} (the mesh's data * fsdp): "
            + ", ".join(faults)
        )
    return {
        name: jax.make_array_from_process_local_data(rows, np.asarray(array))
        for name, array in batch.items()
    }
