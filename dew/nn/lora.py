"""LoRA adapters: low-rank updates of linear layers, trained while the base is frozen.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021). A linear layer
with an adapter returns W x + scale · B A x. A and B are in `params` beside W, as
`lora_a` and `lora_b`, and the scale is in the collection `lora`: W can be frozen by its
path, and variables without both are the base model again, of the same arrays.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from dew.nn.linear import FACTORS, LORA, Linear
from dew.source import Drawable
from dew.tree import flatten, unflatten, widen
from dew.typing import Path, Variables


@dataclass(frozen=True, kw_only=True)
class Site:
    """Linear layer that can have an adapter; `path` is its module's, below `params`."""

    path: Path
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Settings of one layer's adapter; `scale` multiplies its output B A x."""

    site: Site
    rank: int
    scale: float
    dropout: float = 0.0


def sites(model: Drawable, inputs: Mapping[str, Array]) -> tuple[Site, ...]:
    """Returns the linear layers that a model applies to `inputs`, in order.

    Embeddings, language-model heads, routers and experts are not among them.
    """
    layers: dict[Path, Site] = {}

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if isinstance(module, Linear) and context.method_name == "__call__":
            path = ("params", *module.path)
            layers[path] = Site(
                path=path, outputs=tuple(module.outputs), inputs=tuple(module.inputs)
            )
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(model.init, jax.random.key(0), dict(inputs))
    return tuple(layers.values())


def with_adapters(
    variables: Variables, adapters: Sequence[Adapter], key: Key[Array, ""]
) -> Variables:
    """Returns the variables with new adapters, which leave outputs unchanged.

    A is uniform within ± 1 / √(number of inputs) and B is zero, both float32. All other
    leaves are the given arrays themselves.
    """
    leaves = flatten(variables)
    for i, adapter in enumerate(adapters):
        site = adapter.site
        bound = 1 / math.sqrt(math.prod(site.inputs))
        a = jax.random.uniform(
            jax.random.fold_in(key, i),
            (adapter.rank, *site.inputs),
            minval=-bound,
            maxval=bound,
        )
        b = jnp.zeros((*site.outputs, adapter.rank))
        leaves |= adapter_leaves(adapter, a, b)
    return unflatten(leaves)


def adapter_leaves(adapter: Adapter, a: Array, b: Array) -> dict[Path, Array]:
    """Returns the leaves of one adapter by path, its scale and dropout included."""
    path = adapter.site.path
    settings = {"scale": adapter.scale}
    if adapter.dropout:
        settings["dropout"] = adapter.dropout
    return {
        **dict(zip(((*path, name) for name in FACTORS), (a, b), strict=True)),
        **{
            (LORA, *path[1:], name): jnp.float32(value)
            for name, value in settings.items()
        },
    }


def is_factor(path: Path) -> bool:
    """Returns whether a path is that of an adapter's matrix, to train those alone."""
    return path[-1] in FACTORS


def without_adapters(variables: Variables) -> Variables:
    """Returns the base model's variables: the same arrays, without adapters."""
    leaves = flatten({name: tree for name, tree in variables.items() if name != LORA})
    return unflatten({p: leaf for p, leaf in leaves.items() if not is_factor(p)})


def merge_adapters(variables: Variables) -> Variables:
    """Returns the base with W + scale · B A in place of W, each in the dtype of W.

    The sum is computed in float32.
    """
    leaves = flatten(variables)
    base = flatten(without_adapters(variables))
    for path, scale in flatten(variables.get(LORA, {})).items():
        if path[-1] != "scale":
            continue
        linear = ("params", *path[:-1])
        weight = base[(*linear, "weight")]
        a, b = (widen(leaves[(*linear, name)]) for name in FACTORS)
        updated = widen(weight) + widen(scale) * jnp.tensordot(b, a, axes=1)
        base[(*linear, "weight")] = updated.astype(weight.dtype)
    return unflatten(base)
