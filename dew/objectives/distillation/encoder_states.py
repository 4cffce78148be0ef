"""An encoder that learns nothing by itself: only what a teacher's states say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dew.objectives.base import (
    Aux,
    EMASpec,
    InputSpec,
    Mean,
    Objective,
    Prediction,
    Step,
)
from dew.objectives.model import forward, initial_variables
from dew.objectives.tokens import INPUTS, real_tokens
from dew.source import Source
from dew.state import TrainState
from dew.tasks.scoring import Scoring
from dew.tree import thaw
from dew.typing import Batch, PathFilter, Variables


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderStates(Objective[Mean, None]):
    """The states of a model without a head, every real token counting once.

    For both sides of a distillation by hidden states and relations alone.
    """

    source: Source
    seq_len: int
    trainable: PathFilter | None = None
    ema: EMASpec | None = None
    param_dtype: Any = jnp.float32

    @property
    def inputs(self) -> InputSpec:
        """One row of tokens."""
        return {"tokens": jax.ShapeDtypeStruct((self.seq_len,), jnp.int32)}

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
        """Refuses: without a teacher there is nothing to learn.

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
        """Hidden states at every real token, with losses of zero and no logits."""
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        outputs, _ = forward(
            self.source, thaw(params), inputs, step, train=train, layers=layers
        )
        weights = real_tokens(batch).astype(jnp.float32)
        losses = jnp.zeros_like(weights)
        none = jnp.zeros((*weights.shape, 0), jnp.float32)
        said = Prediction(none, losses, weights, outputs.hidden)
        return Mean.of(losses, weights), Aux(), said

    def pipeline(self, state: TrainState, *, ema: bool = True) -> Scoring:
        """The trained encoder, ready to embed and to be saved."""
        return Scoring(self.source, thaw(state.published(ema=ema)))


def mean_pooled(
    states: Float[Array, "batch seq embed"], mask: Bool[Array, "batch seq"]
) -> Float[Array, "batch embed"]:
    """Unit embeddings of texts: the mean over real tokens, as sentence-transformers.

    Reimers and Gurevych, "Sentence-BERT" (2019), section 3.
    """
    seen = mask[..., None]
    summed = jnp.sum(jnp.where(seen, states.astype(jnp.float32), 0), axis=1)
    return summed / jnp.linalg.norm(summed, axis=-1, keepdims=True)
