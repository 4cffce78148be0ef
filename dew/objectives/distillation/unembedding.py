"""Logits put off until a chunk needs them: final states, and the weights of a head."""

from typing import Any

import jax
from jaxtyping import Array, Float

from dew.losses.chunking import LazyLogits
from dew.losses.vocabulary import VocabularyMap
from dew.tree import flatten, unflatten
from dew.typing import Model, Path, Variables


def deferred(
    model: Model,
    variables: Variables,
    final: Float[Array, "batch seq embed"],
    vocabulary: VocabularyMap | None = None,
) -> LazyLogits:
    """A model's final states with the part of its variables that makes them logits.

    Only the leaves that its `unembed` reads are carried through the chunks, and only
    those get gradients from there.
    """
    leaves = flatten(variables)
    read = leaves_read(model, variables, final)
    rest = {path: leaf for path, leaf in leaves.items() if path not in read}

    def unembed(held: Any, states: Any) -> Any:
        whole = unflatten(rest | flatten(held))
        return model.apply(whole, states, method="unembed")

    held = unflatten({path: leaves[path] for path in leaves if path in read})
    return LazyLogits(held, final, unembed, vocabulary)


def leaves_read(
    model: Model, variables: Variables, final: Float[Array, "batch seq embed"]
) -> frozenset[Path]:
    """The paths of the leaves that the model's `unembed` looks at."""
    traced = jax.make_jaxpr(lambda v, f: model.apply(v, f, method="unembed"))(
        *jax.tree.map(_shape, (dict(variables), final))
    ).jaxpr
    used = {id(one) for equation in traced.eqns for one in equation.invars}
    used |= {id(one) for one in traced.outvars}
    paths, _ = jax.tree_util.tree_flatten_with_path(dict(variables))
    return frozenset(
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        for (path, _), variable in zip(paths, traced.invars, strict=False)
        if id(variable) in used
    )


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
