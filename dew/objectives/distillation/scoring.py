"""One forward pass of either side of a distillation, in the detail its terms read.

A student and a teacher are scored by the same function: logits or, where the loss is
computed in chunks, final hidden states with the head that unembeds them, beside the
hidden states and attention scores of single blocks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dew.losses.chunking import (
    CrossTokenizerScores,
    LazyLogits,
    MaterialisedScores,
)
from dew.losses.scores import DenseScores
from dew.losses.vocabulary import VocabularyMap
from dew.objectives.base import Aux, Mean, Objective, Prediction, Step, mean_loss
from dew.objectives.tokens import KeepsAttention, Splittable
from dew.tree import flatten, unflatten
from dew.typing import Batch, Model, Path, Variables

MAPS = "maps"
"""The collection into which a native model sows its attention scores."""


@no_type_check
@struct.dataclass
class Scored:
    """Scores of one side of a batch, with the block outputs that were requested.

    `weights` are those of the positions in the side's own loss; a teacher's are not
    read. `hidden` and `maps` are in the order of the request. `losses` are the side's
    own, as `position_losses` has them; None where its logits are computed chunk by
    chunk.
    """

    scores: MaterialisedScores | LazyLogits | CrossTokenizerScores
    weights: Float[Array, "batch seq"]
    hidden: tuple[Float[Array, "batch seq _"], ...] = ()
    maps: tuple[Float[Array, "batch _ seq seq"], ...] = ()
    losses: Float[Array, "batch seq"] | None = None


def splits(objective: Objective[Any, Any]) -> TypeGuard[Splittable]:
    """Whether final hidden states stand for all that the objective's `predict` does.

    They do not where a class overrides `predict` and inherits `states`: its losses,
    weights and reports would be left out.
    """
    return isinstance(objective, Splittable) and _serves_predict(objective, "states")


def keeps_attention(objective: Objective[Any, Any]) -> TypeGuard[KeepsAttention]:
    """Whether the objective can give attention scores beside all of its `predict`."""
    return isinstance(objective, KeepsAttention) and _serves_predict(objective, "read")


def _serves_predict(objective: Objective[Any, Any], method: str) -> bool:
    """Whether the class with `method` is the one with `predict`, or derives from it."""
    classes = type(objective).__mro__
    first = next((c for c in classes if {method, "predict"} & set(vars(c))), None)
    return first is not None and method in vars(first)


def score(
    objective: Objective[Any, Any],
    variables: Variables,
    batch: Batch,
    step: Step,
    *,
    train: bool,
    layers: Sequence[int],
    maps: Sequence[int],
    split: bool,
    vocabulary: VocabularyMap | None = None,
) -> tuple[Scored, Aux[Any]]:
    """Runs the forward pass of a student or a teacher.

    Args:
        objective: the token objective of that side.
        variables: its whole variables.
        batch: the batch in its own tokens.
        step: the current step.
        train: whether dropout is on, as for a student.
        layers: blocks whose hidden states the terms compare.
        maps: blocks whose attention scores the terms compare.
        split: whether logits are computed chunk by chunk from the final hidden
            states; without effect where the objective does not separate them, or
            where attention scores are requested.
        vocabulary: the map from a teacher's rows of logits to the student's.

    Raises:
        ValueError: attention scores are requested of a model that stores none.
    """
    if split and not maps and splits(objective):
        states, aux = objective.states(
            variables, batch, step, train=train, layers=layers
        )
        source, whole = objective.splits(variables)
        lazy = lazy_logits(source.model, whole, states.final, vocabulary)
        return Scored(lazy, states.weights, states.hidden), aux
    attention: tuple[Array, ...] = ()
    if maps:
        stats, aux, prediction, attention = with_attention(
            objective, variables, batch, step, train=train, layers=layers, maps=maps
        )
    else:
        stats, aux, prediction = objective.predict(
            variables, batch, step, train=train, layers=layers
        )
    scores = MaterialisedScores(DenseScores(prediction.logits, vocabulary))
    losses = position_losses(objective, stats, prediction)
    scored = Scored(
        scores, prediction.weights, prediction.hidden, attention, losses=losses
    )
    return scored, aux


def position_losses(
    objective: Objective[Any, Any], stats: object, prediction: Prediction
) -> Float[Array, "batch seq"]:
    """Returns the loss of every position, whose weighted mean is that of `stats`.

    What belongs to no position, as an auxiliary loss of the routers, is spread evenly.
    Positions of weight zero have a loss of zero.

    Raises:
        TypeError: `stats` are not one `Mean`, as every `predict` must return.
    """
    if not isinstance(stats, Mean):
        raise TypeError(
            f"{type(objective).__name__}.predict must return one Mean over its "
            f"positions first, got {type(stats).__name__}"
        )
    of_positions = Mean.of(prediction.losses, prediction.weights)
    rest = mean_loss(stats)[0] - mean_loss(of_positions)[0]
    live = prediction.weights > 0
    losses = jnp.where(live, prediction.losses, jnp.zeros((), prediction.losses.dtype))
    return jnp.where(live, losses.astype(rest.dtype) + rest, 0)


def with_attention(
    objective: Objective[Any, Any],
    variables: Variables,
    batch: Batch,
    step: Step,
    *,
    train: bool,
    layers: Sequence[int],
    maps: Sequence[int],
) -> tuple[Mean, Aux[Any], Prediction, tuple[Float[Array, "batch _ seq seq"], ...]]:
    """Runs `predict` so that it also returns the attention scores of some blocks.

    Scores are before the softmax, [batch, heads, queries, keys].

    Raises:
        ValueError: the model stores no scores, as a lowered one whose kernels are
            fused, or has no block of a requested number.
    """
    if not keeps_attention(objective):
        raise ValueError(no_attention(objective))
    stats, aux, prediction, sown = objective.read(
        variables, batch, step, train=train, layers=layers, opened=(MAPS,)
    )
    blocks = sown[MAPS]["layers"]
    count = len(blocks)
    faults = [i for i in maps if not -count <= i < count]
    if faults:
        raise ValueError(
            f"attention maps are requested of blocks {faults}; there are {count} blocks"
        )
    scores = tuple(blocks[str(i % count)]["attn"]["scores"][0] for i in maps)
    return stats, aux, prediction, scores


def no_attention(objective: Objective[Any, Any]) -> str:
    """Returns the error message for an objective without attention scores."""
    name = type(objective).__name__
    if isinstance(objective, KeepsAttention):
        return (
            f"{name} defines predict and inherits read, so that attention scores would "
            "come without its own loss and reports; define read beside it"
        )
    return (
        f"{name} keeps no attention scores; match hidden states or their relations "
        "instead"
    )


def lazy_logits(
    model: Model,
    variables: Variables,
    final: Float[Array, "batch seq embed"],
    vocabulary: VocabularyMap | None = None,
) -> LazyLogits:
    """Pairs a model's final hidden states with the variables that unembed them.

    Only the leaves that its `unembed` reads are carried through the chunks, and only
    those get gradients from there.
    """
    leaves = flatten(variables)
    head = unembedding_leaves(model, variables, final)
    trunk = {path: leaf for path, leaf in leaves.items() if path not in head}

    def unembed(held: Mapping[str, Any], states: Array) -> Array:
        complete = unflatten(trunk | flatten(held))
        return model.apply(complete, states, method="unembed")

    held = unflatten({path: leaves[path] for path in leaves if path in head})
    return LazyLogits(held, final, unembed, vocabulary)


def unembedding_leaves(
    model: Model, variables: Variables, final: Float[Array, "batch seq embed"]
) -> frozenset[Path]:
    """Returns the paths of the variables that the model's `unembed` reads.

    Found in the jaxpr of `unembed`, so that a tied head, a final norm or a bias need
    no list of names.
    """
    jaxpr = jax.make_jaxpr(lambda v, f: model.apply(v, f, method="unembed"))(
        *jax.tree.map(_shape, (dict(variables), final))
    ).jaxpr
    used = {id(operand) for equation in jaxpr.eqns for operand in equation.invars}
    used |= {id(output) for output in jaxpr.outvars}
    paths, _ = jax.tree_util.tree_flatten_with_path(dict(variables))
    return frozenset(
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        for (path, _), variable in zip(paths, jaxpr.invars, strict=False)
        if id(variable) in used
    )


def _shape(leaf: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
