"""Rows that the student wrote itself: prompts of the data, and its continuations."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from dew.losses.term import Schedule, at, check_positive, check_share
from dew.objectives.base import Mean, Step
from dew.objectives.tokens import real_tokens
from dew.source import Source
from dew.tasks.generation import generate_tokens
from dew.typing import Batch, Variables

SALT = 0x0D15
"""Sets the draws apart from those that dropout makes of the same key."""


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Lets the student continue some rows of every batch, with the weights of the step.

    Each row is its own coin of `rate`; coins and samples follow from the step's key
    alone, so a resumed run draws what an uninterrupted one does. A prompt is what comes
    before the row's first token of `loss_mask`, or without one all but `new_tokens` of
    the row; of packed rows it is the document that it ends in. Only what was sampled
    counts, up to and with the first end token, and no gradient goes through sampling:
    Agarwal et al., "On-Policy Distillation of Language Models: Learning from
    Self-Generated Mistakes" (2024), algorithm 1, which throws one coin for a whole
    batch.

    Every row is sampled whatever its coin says, for a compiled step has one shape; only
    batches without any are spared.
    """

    rate: Schedule
    new_tokens: int
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_share(self, "rate", self.rate)
        check_positive(self, "temperature", self.temperature)
        if self.new_tokens < 1:
            raise ValueError(
                f"OnPolicy.new_tokens must be at least 1, got {self.new_tokens}"
            )

    def mixed(
        self, source: Source, variables: Variables, batch: Batch, step: Step
    ) -> tuple[Batch, dict[str, Mean]]:
        """The batch with its sampled rows, and how much was sampled.

        Raises:
            ValueError: the rows have no room for a prompt before `new_tokens`.
        """
        if not callable(self.rate) and self.rate == 0:
            return batch, {}
        rows, seq = batch["tokens"].shape
        if self.new_tokens >= seq:
            raise ValueError(
                f"OnPolicy.new_tokens must leave room for a prompt in rows of {seq} "
                f"tokens, got {self.new_tokens}"
            )
        coins, draws = jax.random.split(jax.random.fold_in(step.key, SALT))
        tokens, real = self._prompts(batch)
        chosen = jax.random.bernoulli(coins, at(self.rate, step.step), (rows,))
        chosen &= jnp.any(real, axis=1)

        def sample() -> Array:
            return generate_tokens(
                source.model,
                lax.stop_gradient(variables),
                tokens,
                # A prompt of nothing is never chosen; it must only not be empty.
                real | ~jnp.any(real, axis=1, keepdims=True),
                new_tokens=self.new_tokens,
                ends=source.eos_ids,
                temperature=jnp.float32(self.temperature),
                key=draws,
            )

        def nothing() -> Array:
            return jnp.zeros((rows, self.new_tokens), jnp.int32)

        new = lax.cond(jnp.any(chosen), sample, nothing)
        written = _written(tokens, real, new, source.eos_ids)
        reports = {
            "on_policy/rows": Mean(_count(chosen), jnp.float32(rows)),
            "on_policy/new_tokens": Mean(
                _count(written["loss_mask"] & chosen[:, None]), _count(chosen)
            ),
        }
        return _replaced(batch, written, chosen), reports

    def _prompts(
        self, batch: Batch
    ) -> tuple[Int[Array, "batch prompt"], Bool[Array, "batch prompt"]]:
        """Prompts laid against the right, and which of their tokens are real."""
        rows, seq = batch["tokens"].shape
        width = seq - self.new_tokens
        ends = jnp.full((rows,), width)
        if "loss_mask" in batch:
            ends = jnp.argmax(batch["loss_mask"].astype(bool), axis=1)
        at_ = jnp.arange(width)[None] + (ends - width)[:, None]
        inside, at_ = at_ >= 0, jnp.maximum(at_, 0)
        real = inside & jnp.take_along_axis(real_tokens(batch), at_, axis=1)
        if "segment_ids" in batch:
            segments = jnp.take_along_axis(batch["segment_ids"], at_, axis=1)
            real &= segments == segments[:, -1:]
        tokens = jnp.take_along_axis(batch["tokens"], at_, axis=1)
        return jnp.where(real, tokens, 0).astype(jnp.int32), real


def _written(
    prompt: Int[Array, "batch prompt"],
    real: Bool[Array, "batch prompt"],
    new: Int[Array, "batch new"],
    ends: tuple[int, ...],
) -> dict[str, Array]:
    """Rows of one document each, from the left: its prompt, what was sampled, padding.

    An end token is told by being the first one sampled, never by being the padding's.
    """
    is_end = jnp.isin(new, jnp.asarray(ends, jnp.int32)).astype(jnp.int32)
    kept = jnp.cumsum(is_end, axis=1) - is_end == 0
    row = jnp.concatenate([prompt, new], axis=1)
    live = jnp.concatenate([real, kept], axis=1)
    drawn = jnp.concatenate([jnp.zeros_like(real), kept], axis=1)
    seq = row.shape[1]
    # Real tokens stand in one stretch, so moving the row moves them all.
    start = jnp.argmax(live, axis=1)[:, None]
    place = jnp.arange(seq)[None] + start
    inside, place = place < seq, jnp.minimum(place, seq - 1)
    moved = [jnp.take_along_axis(x, place, axis=1) for x in (row, live, drawn)]
    mask = inside & moved[1]
    return {
        "tokens": jnp.where(mask, moved[0], 0),
        "mask": mask,
        "segment_ids": mask.astype(jnp.int32),
        "positions": jnp.where(mask, jnp.arange(seq)[None], 0),
        "loss_mask": mask & moved[2],
    }


def _replaced(
    batch: Batch, written: dict[str, Array], chosen: Bool[Array, " batch"]
) -> Batch:
    """The batch with the chosen rows replaced; masks are added where it had none."""
    everything = jnp.ones(batch["tokens"].shape, bool)
    whole = {"mask": everything, "loss_mask": everything, **batch}
    new = {
        name: jnp.where(chosen[:, None], leaf.astype(whole[name].dtype), whole[name])
        for name, leaf in written.items()
        if name in whole
    }
    return {**whole, **new}


def _count(flags: Bool[Array, "..."]) -> Array:
    return jnp.sum(flags.astype(jnp.float32))
