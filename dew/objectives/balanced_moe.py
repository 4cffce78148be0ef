"""Language modelling by a mixture of experts that balances itself without a loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
"""How many tokens each expert read, laid out as the biases in the collection `moe`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BalancedLM(Objective[Mean, Loads]):
    """`CausalLM` of a decoder with balanced routers, whose biases move once a commit.

    Experts that read more real tokens than the mean of a window are lowered by `speed`
    in their router's ranks, others raised: "DeepSeek-V3" (2024), section 2.1.2.
    """

    lm: CausalLM
    speed: float = 0.001

    artifact: ClassVar[type | None] = TokenScores

    def __post_init__(self) -> None:
        object.__setattr__(self, "ema", self.lm.ema)

    @property
    def inputs(self) -> InputSpec:
        """One row of tokens."""
        return self.lm.inputs

    @property
    def bank_sites(self) -> tuple[DecoderBank, ...]:
        """The stacks of a decoder that scans its blocks."""
        return self.lm.bank_sites

    def held_variables(self) -> Variables | None:
        """The weights that were loaded, if any."""
        return self.lm.held_variables()

    def init(self, key: jax.Array, variables: Variables | None = None) -> Variables:
        """The language model's variables, among them its routers' biases.

        Raises:
            ValueError: no router of the model is balanced.
        """
        made = self.lm.init(key, variables)
        if "moe" not in made:
            raise ValueError(
                "BalancedLM needs a model with balanced routers, MoE(balanced=True); "
                f"this one has the collections {sorted(made)}"
            )
        return made

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
        """The loss, with logits and hidden states behind it."""
        opened = ("routing", "qk") if self.lm.qk_stats else ("routing",)
        prediction, sown = self.lm.read(
            params, batch, step, train=train, layers=layers, opened=opened
        )
        stats = Mean.of(prediction.losses, prediction.weights)
        loads = expert_loads(params["moe"], sown["routing"], real_tokens(batch))
        return stats, Aux(qk_stats=sown.get("qk"), effects=loads), prediction

    def labels(self, batch: Batch, step: Step) -> Int[Array, "batch seq"]:
        """The next token of each."""
        return self.lm.labels(batch, step)

    def apply_effects(self, variables: Variables, effects: Loads) -> Variables:
        """The routers' biases, one step nearer to equal loads."""

        def moved(bias: Array, load: Array) -> Array:
            return bias + self.speed * jnp.sign(jnp.mean(load) - load)

        return {"moe": jax.tree.map(moved, variables["moe"], effects)}

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> TokenScores:
        """Loss and weight of every token, dropout off."""
        return self.lm.evaluate(params, batch, step)

    def pipeline(self, state: TrainState, *, ema: bool = True) -> TextGeneration:
        """The trained model, ready to continue texts and to be saved."""
        return self.lm.pipeline(state, ema=ema)
