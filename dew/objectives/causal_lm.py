"""Causal language modelling: cross-entropy of each token given those before it."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dew.batch import arrays_of
from dew.losses.cross_entropy import next_token_losses, next_tokens
from dew.nn.block import DecoderBank, Scanned
from dew.nn.config import MoE
from dew.nn.decoder import NO_HEAD, Decoder
from dew.nn.encoder import Encoder
from dew.objectives.base import Aux, InputSpec, Mean, Prediction, Step
from dew.objectives.model import ModelObjective
from dew.objectives.tokens import (
    TokenScores,
    TokenStates,
    clean_tokens,
    next_token_weights,
    token_inputs,
    token_scores,
    vocabulary_rows,
)
from dew.source import Source
from dew.state import TrainState
from dew.tasks.generation import TextGeneration
from dew.tree import thaw
from dew.typing import Batch, Variables


@dataclass(frozen=True, kw_only=True, eq=False)
class CausalLM(ModelObjective[Mean]):
    """Cross-entropy of the next token, in nats, averaged over the tokens predicted.

    Batches hold `tokens` [batch, seq] and may hold `positions`, `segment_ids` (no token
    is predicted across a boundary, none of segment 0), `mask` (true marks real tokens)
    and `loss_mask` (true marks tokens to be predicted, as for completions only).

    `qk_stats` reports each attention head's largest score, for an optimizer that clips
    by it (QK-Clip).

    `router_loss` is the coefficient of a mixture's router loss, which `RouterLossLM`
    adds; None is that of the model's config (`output_router_logits` and
    `router_aux_loss_coef`), 0 trains without it.

    >>> import dew
    >>> objective = CausalLM(source=dew.load(FOLDER), seq_len=4)
    >>> variables = objective.init(jax.random.key(0))
    >>> batch = {"tokens": jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]])}
    >>> step = Step(jnp.int32(0), jax.random.key(1))
    >>> stats, aux = objective.loss(variables, batch, step)
    >>> float(stats.mass)  # the last token of a row has no successor
    6.0
    """

    seq_len: int
    qk_stats: bool = False
    router_loss: float | None = None

    artifact = TokenScores

    def __post_init__(self) -> None:
        if isinstance(self.source.model, Encoder):
            raise ValueError(
                "CausalLM.source must see no later tokens, and an Encoder attends to "
                "them all; train it with MaskedLM"
            )
        model = self.source.model
        if isinstance(model, Decoder) and model.config.head is None:
            raise ValueError(f"CausalLM.source must give logits, and {NO_HEAD}")

    @property
    def router_coefficient(self) -> float:
        """Coefficient of the router loss in training, 0 where there is none.

        Raises:
            ValueError: a router loss is asked for, by `router_loss` or by the model's
                config, and the model is no mixture on the native road.
        """
        stated, wanted = self.source.config or {}, self.router_loss
        model = self.source.model
        mlp = model.config.mlp if isinstance(model, Decoder) else None
        if isinstance(mlp, MoE):
            return mlp.router_loss if wanted is None else wanted
        if not (stated.get("output_router_logits") if wanted is None else wanted):
            return 0.0
        raise ValueError(
            "the router loss (output_router_logits, router_loss) is computed for "
            "mixtures on the native road, and this model is none: router_loss=0 "
            "(--router-loss 0) trains without it"
        )

    @property
    def inputs(self) -> InputSpec:
        """Shape and dtype of one row of tokens."""
        return {"tokens": jax.ShapeDtypeStruct((self.seq_len,), jnp.int32)}

    @property
    def vocabulary_rows(self) -> int | None:
        """Number of ids that the model has rows for; None where it is not known."""
        return vocabulary_rows(self.source)

    @property
    def bank_sites(self) -> tuple[DecoderBank, ...]:
        """The scanned stacks of a native decoder, none of any other model."""
        model = self.source.model
        return model.banks() if isinstance(model, Scanned) else ()

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Mean, Aux[None]]:
        """The summed loss, with the number of predicted tokens as its mass.

        Raises:
            ValueError: the model is a mixture with a router loss.
        """
        if self.router_coefficient:
            raise ValueError(
                f"the model trains with a router loss of {self.router_coefficient:g} "
                "(output_router_logits), which CausalLM alone does not have: use "
                "RouterLossLM(lm=…), or CausalLM(router_loss=0) to train without it"
            )
        return self.predict(params, batch, step, train=True)[:2]

    def predict(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
    ) -> tuple[Mean, Aux[None], Prediction]:
        """The statistics of the loss, with logits and hidden states behind them."""
        return self.read(params, batch, step, train=train, layers=layers)[:3]

    def read(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
        opened: tuple[str, ...] = (),
    ) -> tuple[Mean, Aux[None], Prediction, Variables]:
        """What `predict` returns, and what layers sow into `opened` collections.

        Raises:
            ValueError: the model sows nothing into one of them, or has no head.
        """
        outputs, sown = self.forward(
            params,
            token_inputs(batch),
            step,
            train=train,
            layers=layers,
            opened=(*self._reported(train), *opened),
        )
        logits = self.logits(outputs)
        losses = next_token_losses(logits, clean_tokens(batch))
        weights = next_token_weights(batch)
        prediction = Prediction(logits, losses, weights, outputs.hidden)
        aux = Aux(qk_stats=sown.get("qk") if self._reported(train) else None)
        return Mean.of(losses, weights), aux, prediction, sown

    def _reported(self, train: bool) -> tuple[str, ...]:
        """The collections that `Aux` reports: the heads' largest scores, if asked."""
        return ("qk",) if self.qk_stats and train else ()

    def states(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
    ) -> tuple[TokenStates, Aux[None]]:
        """The final hidden states of one forward pass; compilation drops the logits.

        Raises:
            ValueError: the model returns logits alone.
        """
        outputs, sown = self.forward(
            params,
            token_inputs(batch),
            step,
            train=train,
            layers=layers,
            opened=self._reported(train),
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
        """The token that follows each position."""
        return next_tokens(clean_tokens(batch))

    def splits(self, params: Variables) -> tuple[Source, Variables]:
        """The model, and its variables with frozen leaves put back."""
        return self.source, thaw(params)

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> TokenScores:
        """Loss and weight of every token, dropout off."""
        return token_scores(self, params, arrays_of(batch), step)

    def pipeline(self, state: TrainState, *, ema: bool = True) -> TextGeneration:
        """The trained model as a task that continues texts and can be saved."""
        return TextGeneration(self.source, thaw(self.published(state, ema=ema)))
