"""Joint-embedding prediction (JEPA): predict the features of hidden positions."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from dew.batch import arrays_of
from dew.objectives.base import Aux, EMASpec, InputSpec, Mean, Objective, Step
from dew.objectives.model import evaluate_scores, forward, initial_variables
from dew.objectives.tokens import TokenScores
from dew.source import Source
from dew.state import TrainState
from dew.tasks.scoring import Scoring
from dew.tree import widen
from dew.typing import Batch, Variables

ENCODER, PREDICTOR = "context_encoder", "predictor"


@dataclass(frozen=True, kw_only=True, eq=False)
class JEPA(Objective[Mean, None]):
    """Distance between predicted and averaged-encoder features of hidden positions.

    Assran et al., "Self-Supervised Learning from Images with a Joint-Embedding
    Predictive Architecture" (2023). Each row hides one span of `width` positions, drawn
    by the step's key, unless the batch has `hidden` [batch, seq] (true marks hidden
    positions); the encoder's `mask` is false there. The predictor takes the encoder's
    states as `inputs_embeds`, with that `mask`; the result of both is `final`. Targets
    are the normalised states of the encoder with the weights of `step.ema` over the
    whole row; no gradient reaches them. `reads` names inputs of `seq` positions.
    """

    source: Source
    predictor: Source
    reads: InputSpec
    seq: int
    embed: int
    width: int
    ema: EMASpec | None

    artifact = TokenScores

    def __post_init__(self) -> None:
        if self.ema is None:
            raise ValueError("JEPA.ema must not be None: its target is the average")
        if not 1 <= self.width < self.seq:
            raise ValueError(f"JEPA.width must be in [1, {self.seq}), got {self.width}")

    @property
    def inputs(self) -> InputSpec:
        """Shapes and dtypes of one example's encoder inputs."""
        return self.reads

    def held_variables(self) -> Variables | None:
        """The loaded weights of encoder and predictor, None when both are drawn."""
        parts = {ENCODER: self.source.variables, PREDICTOR: self.predictor.variables}
        loaded = {name: part["params"] for name, part in parts.items() if part}
        return {"params": loaded} if loaded else None

    def init(self, key: jax.Array, variables: Variables | None = None) -> Variables:
        """Both parts' weights, float32; what was not loaded is drawn from `key`."""
        given = (self.held_variables() if variables is None else variables) or {}
        mask = {"mask": jax.ShapeDtypeStruct((self.seq,), bool)}
        states = jax.ShapeDtypeStruct((self.seq, self.embed), jnp.float32)
        keys = jax.random.split(key)

        def draw(name: str, source: Source, inputs: InputSpec, key: Array) -> Variables:
            loaded = given.get("params", {}).get(name)
            own = None if loaded is None else {"params": loaded}
            return initial_variables(source, {**inputs, **mask}, key, own, jnp.float32)[
                "params"
            ]

        encoder = draw(ENCODER, self.source, self.reads, keys[0])
        predictor = draw(PREDICTOR, self.predictor, {"inputs_embeds": states}, keys[1])
        return {"params": {ENCODER: encoder, PREDICTOR: predictor}}

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Mean, Aux[None]]:
        """The summed distance, with the number of hidden positions as its mass."""
        scores = self._scores(params, batch, step, train=True)
        return Mean.of(scores.losses, scores.weights), Aux()

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> TokenScores:
        """Distance and weight of every position, dropout off."""
        return evaluate_scores(self._scores, params, arrays_of(batch), step)

    def pipeline(self, state: TrainState, *, ema: bool = True) -> Scoring:
        """The averaged or live encoder as a task that embeds and can be saved.

        Although the loss reads the average as its target, that is no frozen reference:
        it follows the training, and is the encoder which the paper evaluates.
        """
        params = self.published(state, ema=ema)["params"]
        return Scoring(self.source, {"params": params[ENCODER]})

    def _scores(
        self, params: Variables, batch: Batch, step: Step, *, train: bool
    ) -> TokenScores:
        if step.ema is None:
            raise ValueError("JEPA needs step.ema: its target is the averaged encoder")
        inputs = {name: batch[name] for name in self.reads}
        rows = next(iter(inputs.values())).shape[0]
        real = batch.get("mask", jnp.ones((rows, self.seq))).astype(bool)
        choice, dropout = jax.random.split(step.key)
        spans = hide_spans(choice, rows, self.seq, self.width)
        hidden = real & batch.get("hidden", spans).astype(bool)
        visible = {"mask": real & ~hidden}
        now = Step(step.step, dropout)

        def run(tree: Variables, name: str, inputs: Batch, train: bool) -> Array:
            part = self.source if name == ENCODER else self.predictor
            own = {"params": tree["params"][name]}
            return jnp.asarray(forward(part, own, inputs, now, train=train)[0].final)

        # The averaged encoder reads the whole row, hidden positions too, without
        # dropout: its states are the target, and only the other two passes learn.
        states = run(step.ema, ENCODER, {**inputs, "mask": real}, False)
        # Standardised over features, without which encoder and average could shrink
        # all states together and lower the distance with nothing learned.
        target = jax.nn.standardize(jax.lax.stop_gradient(widen(states)))
        context = {"inputs_embeds": run(params, ENCODER, {**inputs, **visible}, train)}
        # The predictor has the same mask: the encoder also leaves states at hidden
        # positions, of which it must not make use.
        predicted = widen(run(params, PREDICTOR, {**context, **visible}, train))
        losses = jnp.mean(optax.losses.huber_loss(predicted, target), axis=-1)
        return TokenScores(losses, hidden.astype(jnp.float32))


def hide_spans(key: Array, rows: int, seq: int, width: int) -> Bool[Array, "rows seq"]:
    """True on one random span of `width` positions in each row."""
    # The last start leaves room for the span, so every row hides exactly `width`.
    start = jax.random.randint(key, (rows, 1), 0, seq - width + 1)
    place = jnp.arange(seq)[None]
    return (place >= start) & (place < start + width)
