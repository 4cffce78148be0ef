"""Hidden states of an encoder without a head, for either side of a distillation."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dew.objectives.base import Aux, InputSpec, Mean, Prediction, Step
from dew.objectives.model import ModelObjective
from dew.objectives.tokens import real_tokens, token_inputs
from dew.typing import Batch, Variables


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderStates(ModelObjective[Mean]):
    """Hidden states of a model without a head, with every real token of weight one.

    For both sides of a distillation by hidden states and relations alone.
    """

    seq_len: int

    @property
    def inputs(self) -> InputSpec:
        """Shape and dtype of one row of tokens."""
        return {"tokens": jax.ShapeDtypeStruct((self.seq_len,), jnp.int32)}

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Mean, Aux[None]]:
        """Refuses to compute a loss, which only a teacher can supply.

        Raises:
            TypeError: always.
        """
        raise TypeError("EncoderStates has no loss of its own; give it to Distillation")

    def predict(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
    ) -> tuple[Mean, Aux[None], Prediction]:
        """Returns hidden states at every real token, with zero losses and no logits."""
        outputs, _ = self.forward(
            params, token_inputs(batch), step, train=train, layers=layers
        )
        weights = real_tokens(batch).astype(jnp.float32)
        losses = jnp.zeros_like(weights)
        none = jnp.zeros((*weights.shape, 0), jnp.float32)
        said = Prediction(none, losses, weights, outputs.hidden)
        return Mean.of(losses, weights), Aux(), said


def mean_pooled(
    states: Float[Array, "batch seq embed"], mask: Bool[Array, "batch seq"]
) -> Float[Array, "batch embed"]:
    """Returns unit embeddings of texts: the mean over real tokens, normalised.

    As sentence-transformers: Reimers and Gurevych, "Sentence-BERT" (2019), section 3.
    """
    seen = mask[..., None]
    summed = jnp.sum(jnp.where(seen, states.astype(jnp.float32), 0), axis=1)
    return summed / jnp.linalg.norm(summed, axis=-1, keepdims=True)
