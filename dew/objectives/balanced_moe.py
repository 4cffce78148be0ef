"""Causal language modelling with experts balanced by router biases, without a loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dew.nn.block import DecoderBank
from dew.nn.moe import expert_loads
from dew.objectives.base import Aux, InputSpec, Mean, Objective, Prediction, Step
from dew.objectives.causal_lm import CausalLM
from dew.objectives.tokens import TokenScores, real_tokens
from dew.state import TrainState
from dew.tasks.generation import TextGeneration
from dew.typing import Batch, Variables

Loads = dict[str, Any]
"""Number of tokens routed to each expert, nested as the biases in `moe`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BalancedLM(Objective[Mean, Loads]):
    """`CausalLM` of a decoder with balanced routers, whose biases move once a commit.

    The bias of an expert to which more real tokens than the window's mean were routed
    is lowered by `speed`, that of others raised; biases affect the choice of experts
    alone: "DeepSeek-V3" (2024), section 2.1.2.
    """

    lm: CausalLM
    speed: float = 0.001

    artifact = TokenScores

    def __post_init__(self) -> None:
        object.__setattr__(self, "ema", self.lm.ema)

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
        """The language model's variables, which include its routers' biases.

        Raises:
            ValueError: no router of the model is balanced.
        """
        initial = self.lm.init(key, variables)
        if "moe" not in initial:
            raise ValueError(
                "BalancedLM needs a model with balanced routers, MoE(balanced=True); "
                f"this one has the collections {sorted(initial)}"
            )
        return initial

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Mean, Aux[Loads]]:
        """The language model's loss, and the experts' loads as effects."""
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
    ) -> tuple[Mean, Aux[Loads], Prediction]:
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
    ) -> tuple[Mean, Aux[Loads], Prediction, Variables]:
        """What `predict` returns, and what layers sow into `opened` collections."""
        stats, aux, prediction, sown = self.lm.read(
            params,
            batch,
            step,
            train=train,
            layers=layers,
            opened=("routing", *opened),
        )
        loads = expert_loads(params["moe"], sown["routing"], real_tokens(batch))
        aux = Aux(qk_stats=aux.qk_stats, effects=loads)
        return stats, aux, prediction, sown

    def labels(self, batch: Batch, step: Step) -> Int[Array, "batch seq"]:
        """The token that follows each position."""
        return self.lm.labels(batch, step)

    def apply_effects(self, variables: Variables, effects: Loads) -> Variables:
        """The routers' biases after one step of `speed` towards equal loads."""

        def move(bias: Array, load: Array) -> Array:
            return bias + self.speed * jnp.sign(jnp.mean(load) - load)

        return {"moe": jax.tree.map(move, variables["moe"], effects)}

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> TokenScores:
        """Loss and weight of every token, dropout off."""
        return self.lm.evaluate(params, batch, step)

    def pipeline(self, state: TrainState, *, ema: bool = True) -> TextGeneration:
        """The trained model as a task that continues texts and can be saved."""
        return self.lm.pipeline(state, ema=ema)
