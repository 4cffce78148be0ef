"""Causal language modelling: predict each token from those before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dew.losses.cross_entropy import next_token_losses, next_tokens
from dew.nn.block import DecoderBank, Scanned
from dew.nn.encoder import Encoder
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
from dew.objectives.tokens import INPUTS, TokenScores, TokenStates, next_token_weights
from dew.source import Source
from dew.state import TrainState
from dew.tasks.generation import TextGeneration
from dew.tree import thaw, wide
from dew.typing import Batch, PathFilter, Variables


@dataclass(frozen=True, kw_only=True, eq=False)
class CausalLM(Objective[Mean, None]):
    """Cross-entropy of the next token, in nats, averaged over the tokens predicted.

    Batches hold `tokens` [batch, seq] and may hold `positions`, `segment_ids` (no token
    is predicted across a boundary, none of segment 0), `mask` (true marks real tokens)
    and `loss_mask` (true marks tokens to be predicted, as for completions only).

    Weights train in `param_dtype`; what the model computes in is the model's own
    `dtype`. `trainable` freezes the leaves that it rejects. `qk_stats` reports each
    attention head's largest score, for an optimizer that clips by it.
    """

    source: Source
    seq_len: int
    trainable: PathFilter | None = None
    ema: EMASpec | None = None
    param_dtype: Any = jnp.float32
    qk_stats: bool = False

    artifact: ClassVar[type | None] = TokenScores

    def __post_init__(self) -> None:
        if isinstance(self.source.model, Encoder):
            raise ValueError(
                "CausalLM.source must see no later tokens, and an Encoder sees them "
                "all; train it with MaskedLM"
            )

    @property
    def inputs(self) -> InputSpec:
        """One row of tokens."""
        return {"tokens": jax.ShapeDtypeStruct((self.seq_len,), jnp.int32)}

    @property
    def bank_sites(self) -> tuple[DecoderBank, ...]:
        """The stacks of a native decoder that scans its blocks."""
        model = self.source.model
        return model.banks() if isinstance(model, Scanned) else ()

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
        """The summed loss over the number of tokens predicted."""
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
        """The loss, with logits and hidden states behind it."""
        opened = ("qk",) if self.qk_stats and train else ()
        prediction, sown = self.read(
            params, batch, step, train=train, layers=layers, opened=opened
        )
        stats = Mean.of(prediction.losses, prediction.weights)
        return stats, Aux(qk_stats=sown.get("qk")), prediction

    def read(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
        opened: tuple[str, ...] = (),
    ) -> tuple[Prediction, Variables]:
        """One pass over the batch, and what the layers sow into the `opened`.

        Raises:
            ValueError: the model sows nothing into one of them.
        """
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        outputs, sown = forward(
            self.source,
            thaw(params),
            inputs,
            step,
            train=train,
            layers=layers,
            opened=opened,
        )
        logits = wide(outputs.logits)
        losses = next_token_losses(logits, batch["tokens"])
        weights = next_token_weights(batch)
        return Prediction(logits, losses, weights, outputs.hidden), sown

    def states(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
    ) -> tuple[TokenStates, Aux[None]]:
        """One pass up to the output embedding, which compilation leaves out."""
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        opened = ("qk",) if self.qk_stats and train else ()
        outputs, sown = forward(
            self.source,
            thaw(params),
            inputs,
            step,
            train=train,
            layers=layers,
            opened=opened,
        )
        if outputs.final is None:
            raise ValueError(
                f"{type(self.source.model).__name__} gives no final states, so its "
                "logits cannot be made in chunks"
            )
        weights = next_token_weights(batch)
        states = TokenStates(outputs.final, weights, outputs.hidden)
        return states, Aux(qk_stats=sown.get("qk"))

    def labels(self, batch: Batch, step: Step) -> Int[Array, "batch seq"]:
        """The next token of each."""
        return next_tokens(batch["tokens"])

    def splits(self, params: Variables) -> tuple[Source, Variables]:
        """Its model and whole variables."""
        return self.source, thaw(params)

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> TokenScores:
        """Loss and weight of every token, dropout off."""
        return self._score(params, dict(batch), step)

    @partial(jax.jit, static_argnums=0)
    def _score(self, params: Variables, batch: Batch, step: Step) -> TokenScores:
        _, _, prediction = self.predict(params, batch, step, train=False)
        return TokenScores(prediction.losses, prediction.weights)

    def pipeline(self, state: TrainState, *, ema: bool = True) -> TextGeneration:
        """The trained model, ready to continue texts and to be saved."""
        return TextGeneration(self.source, thaw(state.published(ema=ema)))
