"""Supervised learning: a label for every example."""

from dataclasses import dataclass
from typing import Any, ClassVar, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dew.losses.supervised import Classification, Regression
from dew.objectives.base import Aux, EMASpec, InputSpec, Mean, Objective, Step
from dew.objectives.model import evaluate_scores, forward, initial_variables
from dew.source import Source
from dew.state import TrainState
from dew.tasks.scoring import Scoring
from dew.tree import thaw, wide
from dew.typing import Batch, PathFilter, Variables


@no_type_check
@struct.dataclass
class LabelScores:
    """What a model said of each example of a batch, with the loss and its weight."""

    logits: Float[Array, "batch *targets"]
    labels: Int[Array, " batch"] | Float[Array, "batch *targets"]
    losses: Float[Array, " batch"]
    weights: Float[Array, " batch"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Supervised(Objective[Mean, None]):
    """A `criterion` between the model's logits and `labels`, averaged over examples.

    Batches hold what `reads` names, `labels`, and may hold `loss_mask` [batch] (true
    marks examples that count). `collections` are those that a training pass replaces,
    such as `batch_stats`; they read every row, so a padded batch should repeat rows.
    """

    source: Source
    reads: InputSpec
    criterion: Classification | Regression
    collections: tuple[str, ...] = ()
    trainable: PathFilter | None = None
    ema: EMASpec | None = None
    param_dtype: Any = jnp.float32

    artifact: ClassVar[type | None] = LabelScores

    @property
    def inputs(self) -> InputSpec:
        """What the model reads of one example."""
        return self.reads

    def held_variables(self) -> Variables | None:
        """The weights that were loaded, if any."""
        return self.source.variables

    def init(self, key: jax.Array, variables: Variables | None = None) -> Variables:
        """The loaded weights in `param_dtype`, or new ones drawn from `key`."""
        return initial_variables(
            self.source, self.inputs, key, variables, self.param_dtype, self.trainable
        )

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Mean, Aux[None]]:
        """The weighted sum of the losses over the weights."""
        scores, updated = self._scores(params, batch, step, train=True)
        stats = Mean.of(scores.losses, scores.weights)
        return stats, Aux(variables=updated or None)

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> LabelScores:
        """Logits, loss and weight of every example, dropout off."""
        return evaluate_scores(self._scores, params, dict(batch), step)[0]

    def pipeline(self, state: TrainState, *, ema: bool = True) -> Scoring:
        """The trained model, ready to score examples and to be saved."""
        return Scoring(self.source, thaw(state.published(ema=ema)))

    def _scores(
        self, params: Variables, batch: Batch, step: Step, *, train: bool
    ) -> tuple[LabelScores, Variables]:
        outputs, updated = forward(
            self.source,
            thaw(params),
            {name: batch[name] for name in self.reads},
            step,
            train=train,
            opened=self.collections if train else (),
        )
        logits, labels = wide(outputs.logits), batch["labels"]
        losses, weights = self.criterion(logits, labels)
        if "loss_mask" in batch:
            weights = jnp.where(batch["loss_mask"].astype(bool), weights, 0)
        return LabelScores(logits, labels, losses, weights), updated
