"""Shapes of a model's variables, found without allocating any of them."""

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from dew.nn.decoder import Decoder
from dew.tree import flatten
from dew.typing import Path


def variable_shapes(model: nn.Module) -> dict[Path, tuple[int, ...]]:
    """Returns the shape of every variable, by path.

    A decoder is traced with one layer of each kind, since tracing all of them takes
    longer than reading a small model. Windows and rotary embeddings change no shape.
    """
    if not isinstance(model, Decoder):
        return _traced_shapes(model)
    c = model.config
    kinds = [c.mlp_of(i) for i in range(c.layers)]
    distinct = list(dict.fromkeys(kinds))
    short = replace(
        c,
        layers=len(distinct),
        attention=replace(c.attention, windows=(), no_rope_layers=()),
        dense_layers=tuple(i for i, mlp in enumerate(distinct) if mlp is c.dense),
    )
    traced = _traced_shapes(model.clone(config=short))
    stacks = [path for path in traced if path[1] == "layers"]
    shapes = {path: shape for path, shape in traced.items() if path not in stacks}
    for i, mlp in enumerate(kinds):
        first = str(distinct.index(mlp))
        shapes |= {
            (*path[:2], str(i), *path[3:]): traced[path]
            for path in stacks
            if path[2] == first
        }
    return shapes


def _traced_shapes(model: nn.Module) -> dict[Path, tuple[int, ...]]:
    tokens = jnp.zeros((1, 1), jnp.int32)
    tree = jax.eval_shape(model.init, jax.random.key(0), {"tokens": tokens})
    return {path: leaf.shape for path, leaf in flatten(tree).items()}
