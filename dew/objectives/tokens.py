"""Shared by token objectives: inputs, weights, scores, states and attention maps."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dew.objectives.base import Aux, Mean, Objective, Prediction, Step
from dew.source import Source
from dew.typing import Batch, Variables

INPUTS = ("tokens", "positions", "segment_ids", "mask")
"""The arrays of a batch that a token model is applied to, where a batch has them."""


@no_type_check
@struct.dataclass
class TokenScores:
    """Loss and weight of every position of a batch, each [batch, seq]."""

    losses: Float[Array, "batch seq"]
    weights: Float[Array, "batch seq"]


@no_type_check
@struct.dataclass
class TokenStates:
    """Final hidden states, the weight of every position, and the requested layers.

    `final` are the states after the final norm, from which `unembed` makes logits.
    """

    final: Float[Array, "batch seq embed"]
    weights: Float[Array, "batch seq"]
    hidden: tuple[Float[Array, "batch seq embed"], ...] = ()


@runtime_checkable
class Splittable(Protocol):
    """A token objective that gives final hidden states and the output head apart."""

    def states(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
    ) -> tuple[TokenStates, Aux[Any]]:
        """The forward pass of `predict` up to the output embedding."""
        ...

    def splits(self, params: Variables) -> tuple[Source, Variables]:
        """The model whose `unembed` makes logits of the states, and its variables."""
        ...


@runtime_checkable
class Labelled(Protocol):
    """An objective whose loss at each position is that of one label."""

    def labels(self, batch: Batch, step: Step) -> Int[Array, "batch seq"]:
        """The label of each position, >= 0; arbitrary where the weight is 0."""
        ...


@runtime_checkable
class TokenModel(Protocol):
    """An objective whose batches hold ids of a vocabulary of known size."""

    @property
    def vocabulary_rows(self) -> int | None:
        """Number of rows of the token table; None where it is not known."""
        ...


def vocabulary_rows(source: Source) -> int | None:
    """Returns the number of ids that a model has rows for; None if it is not known."""
    rows = (source.config or {}).get("vocab_size")
    return rows if isinstance(rows, int) else None


def token_inputs(batch: Batch) -> dict[str, Array]:
    """The arrays of a batch that a token model is applied to: those in `INPUTS`."""
    return {name: batch[name] for name in INPUTS if name in batch}


@partial(jax.jit, static_argnums=0)
def token_scores(
    objective: Objective[Any, Any], params: Variables, batch: Batch, step: Step
) -> TokenScores:
    """Loss and weight of every position as `predict` makes them, dropout off."""
    _, _, prediction = objective.predict(params, batch, step, train=False)
    return TokenScores(prediction.losses, prediction.weights)


def clean_tokens(batch: Batch) -> Int[Array, "batch seq"]:
    """The tokens of a batch with 0 for padding, whatever stands there."""
    return jnp.where(real_tokens(batch), batch["tokens"], 0)


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


def _next(flags: Bool[Array, "batch seq"]) -> Bool[Array, "batch seq"]:
    """The flag of the following position at each position; False at the last."""
    return jnp.roll(flags, -1, axis=1).at[:, -1].set(False)


@runtime_checkable
class KeepsAttention(Protocol):
    """A token objective whose model can keep the attention scores of its layers.

    `predict` is `read` without the last item, so that neither leaves out a report of
    the other.
    """

    def read(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
        opened: tuple[str, ...] = (),
    ) -> tuple[Mean, Aux[Any], Prediction, Variables]:
        """What `predict` returns, and what layers sow into `opened` collections."""
        ...


def real_tokens(batch: Batch) -> Bool[Array, "batch seq"]:
    """True for the tokens of a text, false for padding, from `mask` and segments."""
    real = jnp.ones(batch["tokens"].shape, bool)
    if "mask" in batch:
        real = batch["mask"].astype(bool)
    if "segment_ids" in batch:
        real &= batch["segment_ids"] != 0
    return real
