"""Lengths as plain ints, where a graph reads them off a tensor."""

from typing import Any

from jax import Array

from dew.bridges.ops.table import Op


def _size(self: Array, dim: int) -> int:
    return self.shape[dim]


def _numel(self: Array) -> int:
    return self.size


def _assert(self: Any, assert_msg: str) -> None:
    if not self:
        raise ValueError(
            f"the torch module does not hold at these shapes: {assert_msg}"
        )


OPS: dict[str, Op] = {
    "aten.sym_size.int": _size,
    "aten.sym_numel.default": _numel,
    "aten._assert_scalar.default": _assert,
}
