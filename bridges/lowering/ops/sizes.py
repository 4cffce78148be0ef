"""Lengths as plain ints, where a graph reads them off a tensor."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jax import Array

from dew.bridges.lowering.ops.op import Op


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

COUNTING: Mapping[Any, Callable[..., Any]] = {
    torch.sym_float: float,
    torch.sym_int: int,
    torch.sym_ite: lambda b, t, f: t if b else f,
    torch.sym_max: max,
    torch.sym_min: min,
    torch.sym_not: operator.not_,
    torch.sym_sum: sum,
}
"""Functions of lengths alone, which a graph with free lengths calls as no ops."""
