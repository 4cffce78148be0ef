"""Overloads that run functions of torch2jax, each through the torch call it serves.

A torch function stands for the implementation that torch2jax registers for it, and an
operator for the method of its stand-in for a tensor. Every one of them passes the tests
of its overload unchanged and leaves the same graph as a function of dew's did;
`python -m docs.generate.torch2jax_ops` tries them all.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dew.bridges.lowering.ops.aliases import alias_entries

_NAMED: dict[str, Callable[..., Any]] = {
    "aten.bernoulli.default": torch.bernoulli,
    "aten.exp.default": torch.exp,
    "aten.linear.default": torch.nn.functional.linear,
    "aten.permute.default": torch.permute,
    "aten.permute_copy.default": torch.permute,
    "aten.pow.Tensor_Tensor": torch.pow,
    "aten.relu.default": torch.nn.functional.relu,
    "aten.sqrt.default": torch.sqrt,
    "aten.tanh.default": torch.tanh,
    **{
        f"aten.{name}.default": operator.matmul
        for name in ("matmul", "mm", "bmm", "mv", "dot")
    },
    "aten.eq.Tensor": operator.eq,
    "aten.ne.Tensor": operator.ne,
    **{
        f"aten.{comparison.__name__}.{overload}": comparison
        for comparison in (operator.lt, operator.le, operator.gt, operator.ge)
        for overload in ("Tensor", "Scalar")
    },
}
FROM_TORCH2JAX: Mapping[str, Callable[..., Any]] = {**alias_entries(_NAMED), **_NAMED}
"""The torch function or Python operator, by the overload that it serves."""
