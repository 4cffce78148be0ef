"""Wrapping of a JAX function as a torch module that torch can differentiate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import PyTree

from dew.bridges.dlpack import to_jax, to_torch
from dew.tree import flatten, unflatten
from dew.typing import Path, Variables


def as_torch_module(
    function: Callable[..., PyTree], variables: Variables, *, trainable: str = "params"
) -> torch.nn.Module:
    """Wraps `function(variables, *inputs, **inputs)` as a `torch.nn.Module`.

    The collection `trainable` becomes torch parameters and the others buffers: copies,
    under their paths within the collection joined by dots, so that a lowered model has
    the state dict of its torch module. Inputs and outputs are tensors; gradients reach
    both inputs and weights. The function must be pure; it is compiled once for
    each set of shapes. Outputs and gradients are copies, so torch may write to them; an
    input changed in place before backward is refused, as torch itself refuses it.

    >>> variables = {"params": {"scale": jnp.array([2.0, 3.0])}}
    >>> module = as_torch_module(lambda v, x: v["params"]["scale"] * x, variables)
    >>> module(torch.ones(2)).sum().backward()
    >>> module.scale.grad
    tensor([1., 1.])
    """
    return _JaxModule(function, variables, trainable)


class _Node(torch.nn.Module):
    """One level of the variables tree."""


class _JaxModule(torch.nn.Module):
    """A JAX function with its variables as torch weights."""

    def __init__(
        self, function: Callable[..., PyTree], variables: Variables, trainable: str
    ) -> None:
        super().__init__()
        leaves = flatten(variables)
        self._paths: list[Path] = list(leaves)
        names = [".".join(path[1:]) for path in leaves]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(
                f"{', '.join(twice)} are in more than one collection, and a torch "
                "module has one name for each weight; rename them in one of the two"
            )
        for path, leaf in leaves.items():
            node = self._submodule(path[1:-1])
            tensor = to_torch(leaf, copy=True)
            if path[0] == trainable and tensor.is_floating_point():
                node.register_parameter(path[-1], torch.nn.Parameter(tensor))
            else:
                node.register_buffer(path[-1], tensor)
        self._call = _Call(function, self._paths)

    def _submodule(self, path: Path) -> torch.nn.Module:
        node: torch.nn.Module = self
        for name in path:
            if name not in dict(node.named_children()):
                node.add_module(name, _Node())
            node = node.get_submodule(name)
        return node

    def forward(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Evaluates the function; arguments that are not tensors are static."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        spots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        fixed = tuple(
            None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        )
        weights = dict(self.named_parameters()) | dict(self.named_buffers())
        tensors = [weights[".".join(path[1:])] for path in self._paths]
        tensors += [leaves[i] for i in spots]
        form = _Form(tuple(spots), fixed, structure)
        results = _Bridge.apply(self._call, form, *tensors)
        return jax.tree.unflatten(self._call.structures[form], results)


@dataclass(frozen=True)
class _Form:
    """Positions of the tensors among a call's arguments; equal forms share a trace."""

    spots: tuple[int, ...]
    fixed: tuple[object, ...]
    tree: PyTree


class _Call:
    """The compiled forward and backward of one function."""

    def __init__(self, function: Callable[..., PyTree], paths: list[Path]) -> None:
        self.function, self.paths = function, paths
        self.structures: dict[_Form, PyTree] = {}
        self.forward = jax.jit(self._flat, static_argnums=0)
        self.forward_vjp = jax.jit(self._vjp, static_argnums=(0, 1))
        self.backward = jax.jit(lambda pull, cotangents: pull(cotangents))

    def _flat(self, form: _Form, arrays: list[jax.Array]) -> list[jax.Array]:
        weights, inputs = arrays[: len(self.paths)], arrays[len(self.paths) :]
        variables = unflatten(dict(zip(self.paths, weights, strict=True)))
        leaves = list(form.fixed)
        for spot, array in zip(form.spots, inputs, strict=True):
            leaves[spot] = array
        args, kwargs = jax.tree.unflatten(form.tree, leaves)
        results, structure = jax.tree.flatten(self.function(variables, *args, **kwargs))
        self.structures[form] = structure
        return results

    def _vjp(
        self, form: _Form, spots: tuple[int, ...], arrays: list[jax.Array]
    ) -> tuple[list[jax.Array], Callable[..., PyTree]]:
        """Returns the outputs, and the pullback to the arrays at `spots`."""

        def partial(variables: list[jax.Array]) -> list[jax.Array]:
            operands = list(arrays)
            for spot, array in zip(spots, variables, strict=True):
                operands[spot] = array
            return self._flat(form, operands)

        return jax.vjp(partial, [arrays[spot] for spot in spots])


class _Bridge(torch.autograd.Function):
    """A function of torch's autograd whose backward is the pullback of `jax.vjp`."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, form: _Form, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        # Copies: torch may write to its own tensors while JAX still reads.
        arrays = [to_jax(tensor.detach(), copy=True) for tensor in tensors]
        needs = ctx.needs_input_grad[2:]
        spots = tuple(i for i, need in enumerate(needs) if need)
        if spots:
            results, ctx.pull = call.forward_vjp(form, spots, arrays)
        else:
            results = call.forward(form, arrays)
        ctx.call, ctx.spots, ctx.count = call, spots, len(tensors)
        ctx.dtypes = [result.dtype for result in results]
        ctx.shapes = [result.shape for result in results]
        ctx.save_for_backward(*tensors)
        outputs = tuple(to_torch(result, copy=True) for result in results)
        ctx.mark_non_differentiable(
            *(out for out in outputs if not out.is_floating_point())
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        # Raises if an input was changed in place since the forward.
        _ = ctx.saved_tensors
        cotangents = [
            _cotangent(gradient, shape, dtype)
            for gradient, shape, dtype in zip(
                gradients, ctx.shapes, ctx.dtypes, strict=True
            )
        ]
        (pulled,) = ctx.call.backward(ctx.pull, cotangents)
        grads: list[torch.Tensor | None] = [None] * ctx.count
        for spot, gradient in zip(ctx.spots, pulled, strict=True):
            grads[spot] = to_torch(gradient, copy=True)
        return None, None, *grads


def _cotangent(
    gradient: torch.Tensor | None, shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array | np.ndarray:
    """Returns the cotangent that JAX requires: zeros of float0 for integer outputs."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return np.zeros(shape, jax.dtypes.float0)
    if gradient is None:
        return jnp.zeros(shape, dtype)
    return to_jax(gradient.detach(), copy=True)
