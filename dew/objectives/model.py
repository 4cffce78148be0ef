"""An objective on one model: its initial variables, forward pass and inference task."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dew.objectives.base import EMASpec, InputSpec, Loss, Objective, Step
from dew.objectives.masking import padding_id, without_masked
from dew.source import Source
from dew.state import TrainState
from dew.tasks.base import Task
from dew.tasks.scoring import Scoring
from dew.tree import FROZEN, cast, freeze, replaced, thaw, widen
from dew.typing import Batch, Outputs, PathFilter, Variables

Scores = TypeVar("Scores")


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelObjective(Objective[Loss, None]):
    """An objective that trains one model, without effects; the base of most objectives.

    `source` is the model with the weights to start from. `trainable` freezes the
    `params` leaves that it rejects, and `ema` requests an average of the weights.
    Weights are stored and trained in `param_dtype`; the dtype of the forward pass is
    the model's own.
    """

    source: Source
    trainable: PathFilter | None = None
    ema: EMASpec | None = None
    param_dtype: DTypeLike = jnp.float32

    @property
    def model_inputs(self) -> InputSpec:
        """Shapes and dtypes of one example of the inputs of the model itself."""
        return self.inputs

    def held_variables(self) -> Variables | None:
        """The loaded weights of the source, None when they are to be drawn."""
        return self.source.variables

    def init(self, key: jax.Array, variables: Variables | None = None) -> Variables:
        """The loaded weights in `param_dtype`, or new ones drawn from `key`."""
        return initial_variables(
            self.source,
            self.model_inputs,
            key,
            variables,
            self.param_dtype,
            self.trainable,
        )

    def forward(
        self,
        params: Variables,
        inputs: Mapping[str, Array],
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
        opened: Sequence[str] = (),
    ) -> tuple[Outputs, Variables]:
        """One forward pass of the model, with frozen leaves put back."""
        return forward(
            self.source,
            thaw(params),
            inputs,
            step,
            train=train,
            layers=layers,
            opened=opened,
        )

    def logits(self, outputs: Outputs) -> Float[Array, "batch ..."]:
        """The logits of a forward pass in float32 or wider.

        Raises:
            ValueError: the model has no head, so its outputs hold no logits.
        """
        if outputs.logits is None:
            raise ValueError(
                f"{type(self.source.model).__name__} gives no logits; "
                f"{type(self).__name__} needs a model with a head"
            )
        return widen(outputs.logits)

    def pipeline(self, state: TrainState, *, ema: bool = True) -> Task:
        """The trained model as a task that scores inputs and can be saved."""
        return Scoring(self.source, thaw(self.published(state, ema=ema)))


def initial_variables(
    source: Source,
    inputs: InputSpec,
    key: Array,
    variables: Variables | None,
    dtype: DTypeLike,
    trainable: PathFilter | None = None,
) -> Variables:
    """The given variables, else the source's, else new ones; weights in `dtype`.

    Collections beside `params` keep their dtypes: running averages and router biases
    are state of their own precision. Leaves that `trainable` rejects are frozen.
    """
    variables = source.variables if variables is None else variables
    if variables is None:
        example = {n: jnp.zeros((1, *s.shape), s.dtype) for n, s in inputs.items()}
        variables = source.draw(key, example)
    weights = {k: v for k, v in variables.items() if k in ("params", FROZEN)}
    initial = replaced(variables, cast(weights, dtype))
    return initial if trainable is None else freeze(initial, trainable)


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
    """One forward pass, and the `opened` collections that layers write during it.

    Dropout is on in training, drawn by the step's key. Whatever stands behind a mask is
    replaced first.

    Raises:
        ValueError: the model leaves nothing in one of the opened collections.
    """
    rngs = {"dropout": step.key} if train else None
    mutable = list(opened) if opened else False
    result = source.model.apply(
        variables,
        without_masked(inputs, pad_id=padding_id(source)),
        train=train,
        layers=tuple(layers),
        rngs=rngs,
        mutable=mutable,
    )
    outputs, updated = result if opened else (result, {})
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
    """The scores that an objective's method gives one batch, compiled, dropout off."""
    return scores(params, batch, step, train=False)
