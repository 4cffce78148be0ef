"""Masked language modelling: cross-entropy of tokens hidden from the encoder."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dew.batch import arrays_of
from dew.losses.cross_entropy import token_losses
from dew.nn.encoder import KINDS
from dew.objectives.base import Aux, InputSpec, Mean, Prediction, Step
from dew.objectives.model import ModelObjective
from dew.objectives.tokens import (
    TokenScores,
    real_tokens,
    token_inputs,
    token_scores,
)
from dew.typing import Batch, Variables

IGNORED = -100
"""The label of a position that is not predicted, as torch has it."""


def hide_tokens(
    tokens: Int[Array, "batch seq"],
    free: Bool[Array, "batch seq"],
    key: Array,
    *,
    rate: float,
    mask_id: int,
    vocab: int,
) -> tuple[Int[Array, "batch seq"], Int[Array, "batch seq"]]:
    """Tokens with the share `rate` of the `free` ones hidden, and their labels.

    Of the hidden tokens 80 % become `mask_id`, 10 % a random token, and 10 % stay as
    they are: Devlin et al., "BERT" (2019), section 3.1. Labels are `IGNORED` where
    nothing is hidden.
    """
    keys = jax.random.split(key, 3)
    hidden = free & jax.random.bernoulli(keys[0], rate, tokens.shape)
    # One uniform draw a position decides among the three cases, which keeps them
    # exclusive: below 0.8 the mask, from there to 0.9 a random token, above it itself.
    fate = jax.random.uniform(keys[1], tokens.shape)
    # Uniform over the whole vocabulary, special tokens included, as BERT draws it.
    other = jax.random.randint(keys[2], tokens.shape, 0, vocab, tokens.dtype)
    replaced = jnp.where(fate < 0.9, other, tokens)
    replaced = jnp.where(fate < 0.8, jnp.full_like(tokens, mask_id), replaced)
    # A hidden token that stays as it is has a label too: the model cannot tell it from
    # the others, so it must predict every position.
    labels = jnp.where(hidden, tokens, jnp.full_like(tokens, IGNORED))
    return jnp.where(hidden, replaced, tokens), labels


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedLM(ModelObjective[Mean]):
    """Cross-entropy of hidden tokens, in nats, averaged over those hidden.

    Of the tokens that are neither padding nor one of `special_ids`, the share `rate` is
    hidden as in BERT, drawn anew by each step's key. A batch may have its own `labels`
    [batch, seq], negative where nothing is predicted, for tokens that are masked
    already; those of padding do not count. Any model with logits over the vocabulary
    will do; `token_type_ids` are passed to it where a batch has them.
    """

    seq_len: int
    vocab: int
    mask_id: int
    special_ids: tuple[int, ...] = ()
    rate: float = 0.15

    artifact = TokenScores

    def __post_init__(self) -> None:
        faults = []
        if not 0 < self.rate <= 1:
            faults.append(f"rate must be in (0, 1], got {self.rate}")
        if not 0 <= self.mask_id < self.vocab:
            faults.append(f"mask_id must be in [0, {self.vocab}), got {self.mask_id}")
        if faults:
            raise ValueError("MaskedLM: " + "; ".join(faults))

    @property
    def inputs(self) -> InputSpec:
        """Shape and dtype of one row of tokens."""
        return {"tokens": jax.ShapeDtypeStruct((self.seq_len,), jnp.int32)}

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Mean, Aux[None]]:
        """The summed loss, with the number of hidden tokens as its mass."""
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
        """The statistics of the loss, with logits and hidden states behind them.

        A teacher and a student with the same step hide the same tokens.

        Raises:
            ValueError: the model has no head over the vocabulary.
        """
        tokens, labels = self._hide(batch, step)
        inputs = {**token_inputs(batch), "tokens": tokens}
        if KINDS in batch:
            inputs[KINDS] = batch[KINDS]
        outputs, _ = self.forward(
            params,
            inputs,
            Step(step.step, _keys(step)[1]),
            train=train,
            layers=layers,
        )
        logits = self.logits(outputs)
        losses = token_losses(logits, jnp.maximum(labels, 0))
        weights = (labels >= 0).astype(jnp.float32)
        prediction = Prediction(logits, losses, weights, outputs.hidden)
        return Mean.of(losses, weights), Aux(), prediction

    def labels(self, batch: Batch, step: Step) -> Int[Array, "batch seq"]:
        """The hidden tokens at their positions, and 0 elsewhere."""
        return jnp.maximum(self._hide(batch, step)[1], 0)

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> TokenScores:
        """Loss and weight of every position, dropout off, masked by the step's key."""
        return token_scores(self, params, arrays_of(batch), step)

    def _hide(
        self, batch: Batch, step: Step
    ) -> tuple[Int[Array, "batch seq"], Int[Array, "batch seq"]]:
        """The model's input tokens, and the labels, negative where not predicted."""
        tokens = batch["tokens"]
        if "labels" in batch:
            return tokens, jnp.where(real_tokens(batch), batch["labels"], IGNORED)
        special = jnp.isin(tokens, jnp.asarray(self.special_ids, tokens.dtype))
        return hide_tokens(
            tokens,
            real_tokens(batch) & ~special,
            _keys(step)[0],
            rate=self.rate,
            mask_id=self.mask_id,
            vocab=self.vocab,
        )


def _keys(step: Step) -> tuple[Array, Array]:
    """A key that draws the hidden tokens, and one for dropout."""
    masking, dropout = jax.random.split(step.key)
    return masking, dropout
