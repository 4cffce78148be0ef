"""The shapes of a model's variables, known before any of them is there."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from dew.nn.decoder import Decoder
from dew.tree import flatten
from dew.typing import Path


def variable_shapes(model: Any) -> dict[Path, tuple[int, ...]]:
    """Returns the shape of every variable, by path.

    Of a decoder one layer of each kind is traced, for tracing all takes longer than
    reading a small model. Layers that differ in windows or in rope alone are alike.
    """
    if not isinstance(model, Decoder):
        return _traced(model)
    c = model.config
    kinds = [c.mlp_of(i) for i in range(c.layers)]
    distinct = list(dict.fromkeys(kinds))
    short = replace(
        c,
        layers=len(distinct),
        attention=replace(c.attention, windows=(), no_rope_layers=()),
        dense_layers=tuple(i for i, mlp in enumerate(distinct) if mlp is c.dense),
    )
    found = _traced(model.clone(config=short))
    stacks = [path for path in found if path[1] == "layers"]
    shapes = {path: shape for path, shape in found.items() if path not in stacks}
    for i, mlp in enumerate(kinds):
        first = str(distinct.index(mlp))
        shapes |= {
            (*path[:2], str(i), *path[3:]): found[path]
            for path in stacks
            if path[2] == first
        }
    return shapes


def _traced(model: Any) -> dict[Path, tuple[int, ...]]:
    tokens = jnp.zeros((1, 1), jnp.int32)
    tree = jax.eval_shape(model.init, jax.random.key(0), {"tokens": tokens})
    return {path: leaf.shape for path, leaf in flatten(tree).items()}
