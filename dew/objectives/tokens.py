"""What the layers of a model attend to, where it can be seen."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dew.objectives.base import Aux, Objective, Prediction, Step
from dew.source import Source
from dew.typing import Batch, Variables

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


def token_inputs(batch: Batch) -> dict[str, Array]:
    """The arrays of a batch that a token model is applied to, of those in `INPUTS`."""
    return {name: batch[name] for name in INPUTS if name in batch}


@partial(jax.jit, static_argnums=0)
def token_scores(
    objective: Objective[Any, Any], params: Variables, batch: Batch, step: Step
) -> TokenScores:
    """Loss and weight of every position as `predict` makes them, dropout off."""
    _, _, prediction = objective.predict(params, batch, step, train=False)
    return TokenScores(prediction.losses, prediction.weights)


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
    """Each position's flag of the one after it; False for the last."""
    return jnp.roll(flags, -1, axis=1).at[:, -1].set(False)


@runtime_checkable
class KeepsAttention(Protocol):
    """A token objective whose model can leave what its layers attend to."""

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
        """One pass, and what the layers sow into the `opened` collections."""
        ...


def with_attention(
    objective: Objective[Any, Any],
    variables: Variables,
    batch: Batch,
    step: Step,
    *,
    train: bool,
    layers: Sequence[int],
    maps: Sequence[int],
) -> tuple[Prediction, tuple[Float[Array, "batch _ seq seq"], ...]]:
    """One pass with the attention scores of some blocks, [batch, heads, queries, keys].

    Raises:
        ValueError: the model keeps no scores, as a lowered one whose kernels are fused.
    """
    if not isinstance(objective, KeepsAttention):
        raise ValueError(
            f"{type(objective).__name__} shows no attention scores; match hidden "
            "states or their relations instead"
        )
    prediction, sown = objective.read(
        variables, batch, step, train=train, layers=layers, opened=(MAPS,)
    )
    blocks = sown[MAPS]["layers"]
    count = len(blocks)
    faults = [i for i in maps if not -count <= i < count]
    if faults:
        raise ValueError(f"attention is asked of blocks {faults}; there are {count}")
    found = tuple(blocks[str(i % count)]["attn"]["scores"][0] for i in maps)
    return prediction, found


MAPS = "maps"
"""The collection that a native model leaves its attention scores in."""


def real_tokens(batch: Batch) -> Bool[Array, "batch seq"]:
    """True for the tokens of a text, false for padding."""
    real = jnp.ones(batch["tokens"].shape, bool)
    if "mask" in batch:
        real = batch["mask"].astype(bool)
    if "segment_ids" in batch:
        real &= batch["segment_ids"] != 0
    return real
