"""On-policy distillation: some rows are sampled from the student in the step."""

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
"""Folded into the step's key, so that samples do not repeat dropout's draws."""


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Replaces some rows of every batch by continuations that the student samples.

    Each row is replaced with probability `rate`, independently. Choices and samples
    follow from the step's key alone, so a resumed run draws what an uninterrupted one
    does. The prompt is the part of a row before its first token of `loss_mask`, or
    without one all but the last `new_tokens`; of a packed row it is the document at
    that place. Only sampled tokens count, up to and with the first end token, and no
    gradient flows through sampling: Agarwal et al., "On-Policy Distillation of Language
    Models: Learning from Self-Generated Mistakes" (2024), algorithm 1, which makes one
    choice for a whole batch.

    Every row is sampled, chosen or not, because a compiled step has one shape; only a
    batch with no chosen row skips sampling.

    Attributes:
        rate: the probability of a row to be replaced, from 0 to 1.
        new_tokens: how many tokens are sampled at most.
        temperature: of the student's distribution when sampling.
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

    def sample_rows(
        self, source: Source, variables: Variables, batch: Batch, step: Step
    ) -> tuple[Batch, dict[str, Mean]]:
        """Returns the batch with its sampled rows, and counts of what was sampled.

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
                # An empty prompt is never chosen, but attention needs one token.
                real | ~jnp.any(real, axis=1, keepdims=True),
                new_tokens=self.new_tokens,
                ends=source.eos_ids,
                temperature=jnp.float32(self.temperature),
                key=draws,
            )

        def zeros() -> Array:
            return jnp.zeros((rows, self.new_tokens), jnp.int32)

        new = lax.cond(jnp.any(chosen), sample, zeros)
        completed = _completed_rows(tokens, real, new, source.eos_ids)
        reports = {
            "on_policy/rows": Mean(_count(chosen), jnp.float32(rows)),
            "on_policy/new_tokens": Mean(
                _count(completed["loss_mask"] & chosen[:, None]), _count(chosen)
            ),
        }
        return _replace_rows(batch, completed, chosen), reports

    def _prompts(
        self, batch: Batch
    ) -> tuple[Int[Array, "batch prompt"], Bool[Array, "batch prompt"]]:
        """Returns prompts padded on the left, and True for their real tokens."""
        rows, seq = batch["tokens"].shape
        width = seq - self.new_tokens
        ends = jnp.full((rows,), width)
        # argmax is the first True. A row without any has an end of 0, hence an empty
        # prompt, and is not chosen.
        if "loss_mask" in batch:
            ends = jnp.argmax(batch["loss_mask"].astype(bool), axis=1)
        # Column j of the prompt is column j + end - width of the row: all prompts end
        # in the last column, where generation starts. Before the row there is padding.
        column = jnp.arange(width)[None] + (ends - width)[:, None]
        inside, column = column >= 0, jnp.maximum(column, 0)
        real = inside & jnp.take_along_axis(real_tokens(batch), column, axis=1)
        if "segment_ids" in batch:
            segments = jnp.take_along_axis(batch["segment_ids"], column, axis=1)
            # Earlier documents of a packed row are no part of the prompt.
            real &= segments == segments[:, -1:]
        tokens = jnp.take_along_axis(batch["tokens"], column, axis=1)
        return jnp.where(real, tokens, 0).astype(jnp.int32), real


def _completed_rows(
    prompt: Int[Array, "batch prompt"],
    real: Bool[Array, "batch prompt"],
    new: Int[Array, "batch new"],
    ends: tuple[int, ...],
) -> dict[str, Array]:
    """Returns rows of one document each: prompt, sampled tokens, padding.

    A row ends with its first sampled end token. Padding is found by position and never
    by its token, which may be an end token itself.
    """
    is_end = jnp.isin(new, jnp.asarray(ends, jnp.int32)).astype(jnp.int32)
    # No end token before this one: true up to and with the first end token.
    in_text = jnp.cumsum(is_end, axis=1) - is_end == 0
    row = jnp.concatenate([prompt, new], axis=1)
    live = jnp.concatenate([real, in_text], axis=1)
    drawn = jnp.concatenate([jnp.zeros_like(real), in_text], axis=1)
    seq = row.shape[1]
    # Real tokens are contiguous, so one shift per row moves the text to the left.
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


def _replace_rows(
    batch: Batch, rows: dict[str, Array], chosen: Bool[Array, " batch"]
) -> Batch:
    """Returns the batch with the chosen rows replaced, adding masks if it had none."""
    everything = jnp.ones(batch["tokens"].shape, bool)
    complete = {"mask": everything, "loss_mask": everything, **batch}
    new = {
        name: jnp.where(
            chosen[:, None], leaf.astype(complete[name].dtype), complete[name]
        )
        for name, leaf in rows.items()
        if name in complete
    }
    return {**complete, **new}


def _count(flags: Bool[Array, "..."]) -> Array:
    return jnp.sum(flags.astype(jnp.float32))
