"""What objectives share: variables to start from, and one pass through a model."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dew.objectives.base import InputSpec, Step
from dew.source import Source
from dew.tree import FROZEN, cast, freeze
from dew.typing import Batch, Outputs, PathFilter, Variables

Scores = TypeVar("Scores")


def initial_variables(
    source: Source,
    inputs: InputSpec,
    key: Array,
    variables: Variables | None,
    dtype: Any,
    trainable: PathFilter | None = None,
) -> dict[str, Any]:
    """The variables as handed over, the source's own, or new ones; floats in `dtype`.

    Collections beside `params` keep their dtypes: running averages and router biases
    are state of their own precision. Leaves that `trainable` rejects are frozen.
    """
    variables = source.variables if variables is None else variables
    if variables is None:
        example = {n: jnp.zeros((1, *s.shape), s.dtype) for n, s in inputs.items()}
        variables = source.draw(key, example)
    weights = {k: v for k, v in variables.items() if k in ("params", FROZEN)}
    whole = {**variables, **cast(weights, dtype)}
    return whole if trainable is None else freeze(whole, trainable)


def forward(
    source: Source,
    variables: Variables,
    inputs: Mapping[str, Array],
    step: Step,
    *,
    train: bool,
    layers: Sequence[int] = (),
    opened: Sequence[str] = (),
) -> tuple[Outputs, Variables]:
    """One pass, dropout by the step's key in training; and the `opened` collections.

    Raises:
        ValueError: the model leaves nothing in a collection that was opened.
    """
    rngs = {"dropout": step.key} if train else None
    mutable = list(opened) if opened else False
    answer = source.model.apply(
        variables,
        inputs,
        train=train,
        layers=tuple(layers),
        rngs=rngs,
        mutable=mutable,
    )
    outputs, updated = answer if opened else (answer, {})
    missing = [name for name in opened if name not in updated]
    if missing:
        raise ValueError(
            f"{type(source.model).__name__} leaves nothing in the collections {missing}"
        )
    return outputs, updated


@partial(jax.jit, static_argnums=0)
def evaluate_scores(
    scores: Callable[..., Scores], params: Variables, batch: Batch, step: Step
) -> Scores:
    """The scores of one batch as a method of an objective makes them, dropout off."""
    return scores(params, batch, step, train=False)
