"""Supervised learning: classification or regression with a label for every example."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dew.batch import arrays_of
from dew.losses.supervised import Classification, Regression
from dew.objectives.base import Aux, InputSpec, Mean, Step
from dew.objectives.masking import without_uncounted
from dew.objectives.model import ModelObjective, evaluate_scores
from dew.typing import Batch, Variables


@no_type_check
@struct.dataclass
class LabelScores:
    """Logits, labels, loss and weight of each example of a batch."""

    logits: Float[Array, "batch *targets"]
    labels: Int[Array, " batch"] | Float[Array, "batch *targets"]
    losses: Float[Array, " batch"]
    weights: Float[Array, " batch"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Supervised(ModelObjective[Mean]):
    """A `criterion` between the model's logits and `labels`, averaged over examples.

    Batches hold the inputs that `reads` names, `labels`, and may hold `loss_mask`
    [batch] (true marks examples that count; whatever the others hold, the first that
    counts is read in their place). `collections` are those that a training pass
    replaces, such as `batch_stats`, unless no example counts.

    >>> from flax import linen as nn
    >>> from dew.source import Source
    >>> from dew.typing import Outputs
    >>> class Linear(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, inputs, *, train=False, layers=()):
    ...         return Outputs(logits=nn.Dense(3)(inputs["x"]))
    >>> objective = Supervised(
    ...     source=Source(model=Linear()),
    ...     reads={"x": jax.ShapeDtypeStruct((5,), jnp.float32)},
    ...     criterion=Classification(),
    ... )
    >>> variables = objective.init(jax.random.key(0))
    >>> batch = {"x": jnp.ones((4, 5)), "labels": jnp.asarray([0, 2, 1, -1])}
    >>> step = Step(jnp.int32(0), jax.random.key(1))
    >>> stats, aux = objective.loss(variables, batch, step)
    >>> float(stats.mass)  # a negative label does not count
    3.0
    """

    reads: InputSpec
    criterion: Classification | Regression
    collections: tuple[str, ...] = ()

    artifact = LabelScores

    @property
    def inputs(self) -> InputSpec:
        """Shapes and dtypes of one example's inputs."""
        return self.reads

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Mean, Aux[None]]:
        """The weighted sum of the losses, with the sum of weights as its mass."""
        scores, updated = self._scores(params, batch, step, train=True)
        stats = Mean.of(scores.losses, scores.weights)
        return stats, Aux(variables=updated or None)

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> LabelScores:
        """Logits, loss and weight of every example, dropout off."""
        return evaluate_scores(self._scores, params, arrays_of(batch), step)[0]

    def _scores(
        self, params: Variables, batch: Batch, step: Step, *, train: bool
    ) -> tuple[LabelScores, Variables]:
        inputs = {name: batch[name] for name in self.reads}
        labels = batch["labels"]
        counted = jnp.ones(len(labels), bool)
        if "loss_mask" in batch:
            counted = batch["loss_mask"].astype(bool)
            inputs, labels = without_uncounted((inputs, labels), counted)
        outputs, updated = self.forward(
            params,
            inputs,
            step,
            train=train,
            opened=self.collections if train else (),
        )
        logits = self.logits(outputs)
        losses, weights = self.criterion(logits, labels)
        scores = LabelScores(logits, labels, losses, jnp.where(counted, weights, 0))
        return scores, self._moved(params, updated, jnp.any(counted))

    def _moved(self, params: Variables, new: Variables, moves: Array) -> Variables:
        """The new collections, or those of `params` where `moves` is false."""
        old = {name: params[name] for name in new}
        return jax.tree.map(lambda n, o: jnp.where(moves, n, o), dict(new), old)
