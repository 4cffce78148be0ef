"""Causal language modelling: predict each token from those before it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dew.nn.encoder import Encoder
from dew.nn.stack import DecoderBank, Scanned
from dew.objectives.base import (
    Aux,
    EMASpec,
    InputSpec,
    Mean,
    Objective,
    Prediction,
    Step,
    mean_of_totals,
    merge_totals,
)
from dew.objectives.model import forward, started
from dew.source import Source
from dew.state import TrainState
from dew.tasks.generation import TextGeneration
from dew.tree import thaw, wide
from dew.typing import Batch, PathFilter, Variables

INPUTS = ("tokens", "positions", "segment_ids", "mask")
"""What of a batch the model reads."""


@no_type_check
@struct.dataclass
class TokenScores:
    """Loss and weight of every position of a batch, each [batch, seq]."""

    losses: Float[Array, "batch seq"]
    weights: Float[Array, "batch seq"]


@no_type_check
@struct.dataclass
class TokenStates:
    """What logits are made of, the weight of every position, and the layers asked for.

    `final` are the states after the final norm.
    """

    final: Float[Array, "batch seq embed"]
    weights: Float[Array, "batch seq"]
    hidden: tuple[Float[Array, "batch seq embed"], ...] = ()


@runtime_checkable
class Splittable(Protocol):
    """A token objective that gives its trunk's states and its unembedding apart."""

    def states(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
    ) -> tuple[TokenStates, Aux[Any]]:
        """One pass up to the output embedding, as `predict` makes it."""
        ...

    def splits(self, params: Variables) -> tuple[Source, Variables]:
        """The model whose `unembed` goes on from there, and its variables."""
        ...


@runtime_checkable
class Labelled(Protocol):
    """An objective that scores each position on one token."""

    def labels(self, batch: Batch, step: Step) -> Int[Array, "batch seq"]:
        """Those tokens, at least 0; any token where the position has no weight."""
        ...


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
        return started(
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


def next_token_weights(batch: Batch) -> Float[Array, "batch seq"]:
    """1 where a real token predicts the next real token of its own document, else 0."""
    real = jnp.ones(batch["tokens"].shape, bool)
    if "mask" in batch:
        real = batch["mask"].astype(bool)
    counted = real & _next(real)
    if "segment_ids" in batch:
        segments = batch["segment_ids"]
        counted &= (segments == jnp.roll(segments, -1, axis=1)) & (segments != 0)
    if "loss_mask" in batch:
        counted &= _next(batch["loss_mask"].astype(bool))
    return counted.astype(jnp.float32)


def next_token_losses(
    logits: Float[Array, "batch seq vocab"], tokens: Int[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """-log softmax(logits) of the following token, float32; the last position is 0."""
    return token_losses(logits, next_tokens(tokens)).at[:, -1].set(0)


def next_tokens(tokens: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Each position's following token; the first of the row for the last."""
    return jnp.roll(tokens, -1, axis=1)


def token_losses(
    logits: Float[Array, "batch seq vocab"], labels: Int[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """-log softmax(logits) of the labels, float32 or wider."""
    logits = wide(logits)
    chosen = jnp.take_along_axis(logits, labels[:, :, None], axis=-1)[:, :, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def _next(flags: Bool[Array, "batch seq"]) -> Bool[Array, "batch seq"]:
    """Each position's flag of the one after it; False for the last."""
    return jnp.roll(flags, -1, axis=1).at[:, -1].set(False)


class NatsPerToken:
    """The mean loss over every token of the pass, never a mean of means."""

    reads = TokenScores

    def __call__(self, artifact: TokenScores, /) -> tuple[float, float]:
        """Summed loss and number of tokens of one batch."""
        stats = Mean.of(artifact.losses, artifact.weights)
        return float(stats.total), float(stats.mass)

    merge = staticmethod(merge_totals)

    def finalize(self, accumulated: tuple[float, float], /) -> float:
        """Nats per token."""
        return mean_of_totals(accumulated)


class Perplexity(NatsPerToken):
    """exp of the mean loss over every token of the pass."""

    def finalize(self, accumulated: tuple[float, float], /) -> float:
        """Perplexity per token."""
        return math.exp(mean_of_totals(accumulated))


class TokenCount(NatsPerToken):
    """How many tokens a pass predicted."""

    def finalize(self, accumulated: tuple[float, float], /) -> float:
        """Tokens."""
        return accumulated[1]


def token_metrics() -> dict[str, NatsPerToken]:
    """The metrics of a language model by the names they are reported under."""
    return {
        "perplexity": Perplexity(),
        "nats_per_token": NatsPerToken(),
        "tokens": TokenCount(),
    }
