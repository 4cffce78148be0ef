"""Causal language modelling of a mixture, with its routers' load-balancing loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from dew.losses.router import RouterSums, load_balancing_loss, router_sums
from dew.nn.block import DecoderBank
from dew.nn.config import MoE
from dew.nn.decoder import Decoder
from dew.objectives.base import (
    Aux,
    InputSpec,
    Mean,
    Objective,
    Prediction,
    Step,
    mean_loss,
)
from dew.objectives.causal_lm import CausalLM
from dew.objectives.tokens import TokenScores, real_tokens
from dew.state import TrainState
from dew.tasks.generation import TextGeneration
from dew.typing import Batch, Variables


@no_type_check
@struct.dataclass
class RoutedStats:
    """Statistics of the predicted tokens, and sums over the tokens of all routers."""

    tokens: Mean
    routers: RouterSums


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterLossLM(Objective[RoutedStats, None]):
    """`CausalLM` of a mixture of experts, plus its routers' load-balancing loss.

    The loss is that of transformers with `output_router_logits`: the mean over the
    predicted tokens, plus `lm.router_coefficient` times the load-balancing loss over
    all layers and real tokens (`dew.losses.router`). The routers' sums are pooled over
    the micro-batches of a commit, as the token losses are: several give the loss and
    gradient of one large batch, where transformers averages a loss of each. Scores and
    evaluations are those of `lm`, without it.
    """

    lm: CausalLM

    artifact = TokenScores

    def __post_init__(self) -> None:
        object.__setattr__(self, "ema", self.lm.ema)
        if self.lm.router_coefficient:
            return
        raise ValueError(
            "RouterLossLM needs a mixture with a router loss: output_router_logits in "
            "its config, or CausalLM(router_loss=…) above 0"
        )

    @property
    def inputs(self) -> InputSpec:
        """Shape and dtype of one row of tokens."""
        return self.lm.inputs

    @property
    def vocabulary_rows(self) -> int | None:
        """Number of ids that the model has rows for; None where it is not known."""
        return self.lm.vocabulary_rows

    @property
    def bank_sites(self) -> tuple[DecoderBank, ...]:
        """The scanned stacks of the language model's decoder."""
        return self.lm.bank_sites

    def held_variables(self) -> Variables | None:
        """The loaded weights of the language model, None when they are drawn."""
        return self.lm.held_variables()

    def init(self, key: jax.Array, variables: Variables | None = None) -> Variables:
        """Returns the variables of the language model."""
        return self.lm.init(key, variables)

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[RoutedStats, Aux[None]]:
        """The summed loss of the tokens, and the sums of the routers."""
        stats, aux, _, sown = self.lm.read(
            params, batch, step, train=True, opened=("router",)
        )
        model = self.lm.source.model
        assert isinstance(model, Decoder)
        assert isinstance(model.config.mlp, MoE)
        routers = router_sums(
            jax.tree.leaves(sown["router"]),
            real_tokens(batch),
            top_k=model.config.mlp.top_k,
        )
        return RoutedStats(stats, routers), aux

    def reduce_loss(self, stats: RoutedStats) -> tuple[jax.Array, jax.Array]:
        """The mean over predicted tokens, plus the weighted loss of the routers."""
        value, active = mean_loss(stats.tokens)
        balance = self.lm.router_coefficient * load_balancing_loss(stats.routers)
        return value + jnp.where(active, balance, 0), active

    def predict(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
    ) -> tuple[Mean, Aux[None], Prediction]:
        """The statistics of the tokens alone, with logits and hidden states."""
        return self.lm.predict(params, batch, step, train=train, layers=layers)

    def labels(self, batch: Batch, step: Step) -> Int[Array, "batch seq"]:
        """The token that follows each position."""
        return self.lm.labels(batch, step)

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> TokenScores:
        """Loss and weight of every token, dropout off."""
        return self.lm.evaluate(params, batch, step)

    def pipeline(self, state: TrainState, *, ema: bool = True) -> TextGeneration:
        """The trained model as a task that continues texts and can be saved."""
        return self.lm.pipeline(state, ema=ema)
