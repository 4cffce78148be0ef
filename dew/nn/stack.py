"""A stack of equal blocks, unrolled or scanned, over the same canonical tree.

Variables are always one subtree per layer. A scanned execution reads a *bank*: the
layers' leaves stacked on a new first axis, made inside the computation and never
stored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dew.typing import Path


@dataclass(frozen=True)
class StackView:
    """How the subtrees `names` of one node become a bank, and come back from it."""

    names: tuple[str, ...]

    def stack(self, node: Mapping[str, Any]) -> Any:
        """The layers' leaves stacked on axis 0, in the order of `names`."""
        layers = [node[name] for name in self.names]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

    def unstack(self, bank: Any) -> dict[str, Any]:
        """One subtree per layer again."""
        return {
            name: jax.tree.map(lambda leaf, i=i: leaf[i], bank)
            for i, name in enumerate(self.names)
        }


@dataclass(frozen=True)
class DecoderBank:
    """A physical scanned stack: where it lies below each collection, and its view."""

    namespace: Path
    view: StackView


@runtime_checkable
class Scanned(Protocol):
    """A model that says which stacks a scanned execution of it reads."""

    def banks(self) -> tuple[DecoderBank, ...]:
        """The stacks, none where blocks are unrolled."""
        ...


def scan_layers(
    block: Callable[[Any, Any, Any], tuple[Any, Any]],
    x: Float[Array, "batch seq embed"],
    bank: Any,
    keys: Any,
    wanted: Sequence[int],
) -> tuple[Float[Array, "batch seq embed"], list[Any], Any]:
    """Runs `block(variables, key, x) -> (x, updates)` over a bank.

    Returns:
        The last output, the outputs of the layers in `wanted`, and the updates stacked.
    """

    def step(x: Any, layer: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
        variables, key = layer
        x, updates = block(variables, key, x)
        return x, (x if wanted else None, updates)

    x, (outputs, updates) = jax.lax.scan(step, x, (bank, keys))
    return x, [outputs[i] for i in wanted], updates
