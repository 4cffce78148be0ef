"""Encoder-decoder language modelling: cross-entropy of the target given the source."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dew.batch import arrays_of
from dew.losses.cross_entropy import token_losses
from dew.objectives.base import Aux, InputSpec, Mean, Prediction, Step
from dew.objectives.model import ModelObjective
from dew.objectives.tokens import TokenScores, token_scores
from dew.state import TrainState
from dew.tasks.seq2seq_generation import DECODER_INPUTS, TargetGeneration
from dew.tree import thaw
from dew.typing import Batch, Variables


@dataclass(frozen=True, kw_only=True, eq=False)
class Seq2SeqLM(ModelObjective[Mean]):
    """Cross-entropy of target tokens, in nats, averaged over the tokens predicted.

    Batches hold the encoder inputs that `reads` names, for example `tokens` and `mask`
    or `input_features`, and `labels` [batch, target], negative where nothing is
    predicted. The decoder's input is `start_id` followed by all labels but the last,
    with `pad_id` for negative ones.
    """

    reads: InputSpec
    target_len: int
    start_id: int
    pad_id: int

    artifact = TokenScores

    @property
    def inputs(self) -> InputSpec:
        """Shapes and dtypes of one example's encoder inputs and labels."""
        return {**self.reads, "labels": self._target}

    @property
    def _target(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.target_len,), jnp.int32)

    @property
    def model_inputs(self) -> InputSpec:
        """Shapes and dtypes of one example's encoder inputs and decoder tokens."""
        return {**self.reads, DECODER_INPUTS: self._target}

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Mean, Aux[None]]:
        """The summed loss, with the number of predicted tokens as its mass."""
        stats, aux, _ = self.predict(params, batch, step, train=True)
        return stats, aux

    def predict(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
    ) -> tuple[Mean, Aux[None], Prediction]:
        """The statistics of the loss, with the decoder's logits and hidden states."""
        labels = batch["labels"]
        shifted = shift_right(labels, start_id=self.start_id, pad_id=self.pad_id)
        read = {name: batch[name] for name in self.reads}
        outputs, _ = self.forward(
            params,
            {**read, DECODER_INPUTS: shifted},
            step,
            train=train,
            layers=layers,
        )
        logits = self.logits(outputs)
        losses = token_losses(logits, self.labels(batch, step))
        weights = (labels >= 0).astype(jnp.float32)
        prediction = Prediction(logits, losses, weights, outputs.hidden)
        return Mean.of(losses, weights), Aux(), prediction

    def labels(self, batch: Batch, step: Step) -> Int[Array, "batch target"]:
        """The tokens of the target, 0 where nothing is predicted."""
        return jnp.maximum(batch["labels"], 0)

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> TokenScores:
        """Loss and weight of every target token, dropout off."""
        return token_scores(self, params, arrays_of(batch), step)

    def pipeline(self, state: TrainState, *, ema: bool = True) -> TargetGeneration:
        """The trained model as a task that generates targets and can be saved."""
        return TargetGeneration(
            self.source, thaw(self.published(state, ema=ema)), self.start_id
        )


def shift_right(
    labels: Int[Array, "batch target"], *, start_id: int, pad_id: int
) -> Int[Array, "batch target"]:
    """The decoder's input: each position has the label before it, the first `start_id`.

    Negative labels become `pad_id`.
    """
    before = jnp.roll(labels, 1, axis=1).at[:, 0].set(start_id)
    return jnp.where(before < 0, jnp.full_like(before, pad_id), before)
