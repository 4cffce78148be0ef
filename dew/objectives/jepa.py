"""Joint-embedding prediction: guess the features of what is hidden, not its values."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

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
    by the step's key, unless the batch says what is `hidden` [batch, seq]; there the
    encoder's `mask` is false. The predictor reads the
    encoder's states as `inputs_embeds`, with that `mask`, and answers in `final`, where
    the encoder answers too. Targets are the states of `step.ema` over the whole row,
    normalised; no gradient reaches them. `reads` are inputs of `seq` positions.
    """

    source: Source
    predictor: Source
    reads: InputSpec
    seq: int
    embed: int
    width: int
    ema: EMASpec | None

    artifact: ClassVar[type | None] = TokenScores

    def __post_init__(self) -> None:
        if self.ema is None:
            raise ValueError("JEPA.ema must not be None: its target is the average")
        if not 1 <= self.width < self.seq:
            raise ValueError(f"JEPA.width must be in [1, {self.seq}), got {self.width}")

    @property
    def inputs(self) -> InputSpec:
        """What the encoder reads of one example."""
        return self.reads

    def held_variables(self) -> Variables | None:
        """The weights of the parts that were loaded, if any."""
        parts = {ENCODER: self.source.variables, PREDICTOR: self.predictor.variables}
        held = {name: part["params"] for name, part in parts.items() if part}
        return {"params": held} if held else None

    def init(self, key: jax.Array, variables: Variables | None = None) -> Variables:
        """Both parts' weights, float32; what was not loaded is drawn from `key`."""
        held = (self.held_variables() if variables is None else variables) or {}
        mask = {"mask": jax.ShapeDtypeStruct((self.seq,), bool)}
        states = jax.ShapeDtypeStruct((self.seq, self.embed), jnp.float32)
        keys = jax.random.split(key)

        def part(name: str, source: Source, inputs: InputSpec, key: Array) -> Variables:
            loaded = held.get("params", {}).get(name)
            own = None if loaded is None else {"params": loaded}
            return initial_variables(source, {**inputs, **mask}, key, own, jnp.float32)[
                "params"
            ]

        encoder = part(ENCODER, self.source, self.reads, keys[0])
        predictor = part(PREDICTOR, self.predictor, {"inputs_embeds": states}, keys[1])
        return {"params": {ENCODER: encoder, PREDICTOR: predictor}}

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Mean, Aux[None]]:
        """The summed distance over the number of positions hidden."""
        scores = self._scores(params, batch, step, train=True)
        return Mean.of(scores.losses, scores.weights), Aux()

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> TokenScores:
        """Distance and weight of every position, dropout off."""
        return evaluate_scores(self._scores, params, dict(batch), step)

    def pipeline(self, state: TrainState, *, ema: bool = True) -> Scoring:
        """The averaged (or live) encoder, ready to embed and to be saved."""
        params = state.inference_variables(ema=ema)["params"]
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
        seen = {"mask": real & ~hidden}
        now = Step(step.step, dropout)

        def read(tree: Variables, name: str, inputs: Batch, train: bool) -> Array:
            part = self.source if name == ENCODER else self.predictor
            own = {"params": tree["params"][name]}
            return jnp.asarray(forward(part, own, inputs, now, train=train)[0].final)

        whole = read(step.ema, ENCODER, {**inputs, "mask": real}, False)
        target = jax.nn.standardize(jax.lax.stop_gradient(widen(whole)))
        context = {"inputs_embeds": read(params, ENCODER, {**inputs, **seen}, train)}
        guess = widen(read(params, PREDICTOR, {**context, **seen}, train))
        losses = jnp.mean(optax.losses.huber_loss(guess, target), axis=-1)
        return TokenScores(losses, hidden.astype(jnp.float32))


def hide_spans(key: Array, rows: int, seq: int, width: int) -> Bool[Array, "rows seq"]:
    """True on one span of `width` positions in each row."""
    start = jax.random.randint(key, (rows, 1), 0, seq - width + 1)
    place = jnp.arange(seq)[None]
    return (place >= start) & (place < start + width)
