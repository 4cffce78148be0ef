"""Whether a graph with free lengths is valid at given ones."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import PyTree
from torch.utils import _pytree as pytree

from dew.bridges.lowering.graph import Program


@dataclass(frozen=True)
class _Shaped:
    """A stand-in for an input in a guard: it has a shape and nothing else."""

    shape: tuple[int, ...]

    def size(self) -> tuple[int, ...]:
        """Returns the shape, as `torch.Tensor.size` does."""
        return self.shape


def holds(program: Program, shapes: Mapping[str, PyTree]) -> bool:
    """Whether the branches that torch took while tracing are right at these lengths.

    `shapes` is the tree of the inputs, with shapes in place of arrays. A guard on
    anything but sizes counts as broken, so that the caller exports another graph.
    """
    leaves = pytree.tree_leaves(dict(shapes), is_leaf=_is_shape)
    # Declared ranges first: they also check each input's rank, and a guard may index
    # any axis.
    if not program.accepts(dict(zip(program.inputs, leaves, strict=True))):
        return False
    inputs = pytree.tree_map(_Shaped, dict(shapes), is_leaf=_is_shape)
    return all(_true(guard, inputs) for guard in program.guards)


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value)


def _true(guard: str, inputs: Mapping[str, PyTree]) -> bool:
    try:
        # The text is torch.export's own, meant to be evaluated with the inputs in `L`.
        return bool(eval(guard, {"L": {"inputs": inputs}, "max": max, "min": min}))
    except (NameError, AttributeError, KeyError, TypeError):
        return False
