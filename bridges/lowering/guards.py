"""Whether a graph with free lengths holds at given ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from dew.bridges.lowering.graph import Program


@dataclass(frozen=True)
class _Shaped:
    """What a guard asks of an input: its lengths."""

    shape: tuple[int, ...]

    def size(self) -> tuple[int, ...]:
        return self.shape


def holds(program: Program, shapes: Mapping[str, Any]) -> bool:
    """Says whether the branches torch took while tracing are right at these lengths.

    `shapes` is the tree of the inputs, shapes for arrays. A guard that asks for more
    than sizes counts as broken, so that the caller makes a graph of its own.
    """
    leaves = pytree.tree_leaves(dict(shapes), is_leaf=_is_shape)
    if not program.accepts(dict(zip(program.inputs, leaves, strict=True))):
        return False
    inputs = pytree.tree_map(_Shaped, dict(shapes), is_leaf=_is_shape)
    return all(_true(guard, inputs) for guard in program.guards)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value)


def _true(guard: str, inputs: Mapping[str, Any]) -> bool:
    try:
        # The text is torch.export's own, written for exactly this.
        return bool(eval(guard, {"L": {"inputs": inputs}, "max": max, "min": min}))
    except (NameError, AttributeError, KeyError, TypeError):
        return False
