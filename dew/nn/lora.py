"""Low-rank adapters: trained beside linear maps, whose own weights stay as they are.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021). A linear map
with an adapter says W x + scale · B A x. A and B lie in `params` beside W, as `lora_a`
and `lora_b`, and the scale in the collection `lora`; so W can be frozen by its path,
and the tree without both is the base again, of the same arrays.
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
    """A linear map of a model that may get an adapter; `path` is that of its module."""

    path: Path
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One site's adapter before it has weights. `scale` multiplies what it says."""

    site: Site
    rank: int
    scale: float
    dropout: float = 0.0


def sites(model: Drawable, inputs: Mapping[str, Array]) -> tuple[Site, ...]:
    """Finds every linear map that a model applies to `inputs`, in order.

    Tables of tokens, output heads, routers and experts are none.
    """
    found: dict[Path, Site] = {}

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if isinstance(module, Linear) and context.method_name == "__call__":
            path = ("params", *module.path)
            found[path] = Site(
                path=path, outputs=tuple(module.outputs), inputs=tuple(module.inputs)
            )
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(model.init, jax.random.key(0), dict(inputs))
    return tuple(found.values())


def with_adapters(
    variables: Variables, adapters: Sequence[Adapter], key: Key[Array, ""]
) -> dict[str, Any]:
    """Returns the variables with new adapters that change nothing yet.

    A is uniform within ± 1 / √(number of inputs) and B zero, both float32. All else is
    the given arrays themselves.
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


def adapter_leaves(adapter: Adapter, a: Array, b: Array) -> dict[Path, Any]:
    """The leaves of one adapter by path."""
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
    """Accepts the matrices of adapters, for training them alone."""
    return path[-1] in FACTORS


def without_adapters(variables: Variables) -> dict[str, Any]:
    """Returns the base: the same arrays, without adapters."""
    leaves = flatten({name: tree for name, tree in variables.items() if name != LORA})
    return unflatten({p: leaf for p, leaf in leaves.items() if not is_factor(p)})


def merged(variables: Variables) -> dict[str, Any]:
    """Returns the base with W + scale · B A in place of W, each in the dtype of W."""
    leaves = flatten(variables)
    base = flatten(without_adapters(variables))
    for path, scale in flatten(variables.get(LORA, {})).items():
        if path[-1] != "scale":
            continue
        linear = ("params", *path[:-1])
        weight = base[(*linear, "weight")]
        a, b = (widen(leaves[(*linear, name)]) for name in FACTORS)
        moved = widen(weight) + widen(scale) * jnp.tensordot(b, a, axes=1)
        base[(*linear, "weight")] = moved.astype(weight.dtype)
    return unflatten(base)
