"""The policy-gradient part of MiniLLM: rewards from the teacher on sampled tokens."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dew.losses.scores import PairedScores, paired_scores
from dew.losses.term import Schedule, Term, TermInputs, at, check_positive, check_share


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Term[TermInputs]):
    """Minus the advantage of a sampled token times its probability ratio, which is 1.

    The reward of a token is log p - log q of it; its advantage is the sum of the
    rewards from it on, `discount`ed, over the discounted count of tokens where
    `length_normalised`. Discount 0 takes each token's own reward. The value reads as
    minus the advantage; the gradient is that of the reverse KL's long-range part.
    Labels must be the student's own samples, and the update the first on them. Gu et
    al., "MiniLLM: Knowledge Distillation of Large Language Models" (2023), section 2.2.

    Looks at whole sequences, so it cannot be chunked.
    """

    needs_scores: ClassVar[type | None] = PairedScores
    needs_labels: ClassVar[bool] = True
    whole_sequence: ClassVar[bool] = True

    temperature: Schedule = 1.0
    discount: float = 0.0
    length_normalised: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "temperature", self.temperature)
        check_share(self, "discount", self.discount)

    def values(self, inputs: TermInputs) -> Float[Array, "batch seq"]:
        """The policy loss of every position that `mask` counts, 0 elsewhere."""
        student, labels = inputs.student, inputs.labels
        if labels is None:
            raise ValueError("PolicyGradient needs the sampled labels, got None")
        teacher = paired_scores(self, inputs.teacher)
        temperature = at(self.temperature, inputs.step)
        a, s = teacher.paired_log_probs(student, temperature)
        if s.shape[-1] != student.shape[-1]:
            raise ValueError(
                f"PolicyGradient needs all {student.shape[-1]} classes of the student, "
                f"the teacher gives {s.shape[-1]}"
            )
        counted = jnp.ones(labels.shape, bool) if inputs.mask is None else inputs.mask
        log_p = jnp.take_along_axis(a, labels[..., None], axis=-1)[..., 0]
        log_q = jnp.take_along_axis(s, labels[..., None], axis=-1)[..., 0]
        reward = jnp.where(counted, log_p - lax.stop_gradient(log_q), 0)
        advantage = self._advantage(reward, counted.astype(reward.dtype))
        ratio = jnp.exp(log_q - lax.stop_gradient(log_q))
        return jnp.where(counted, -advantage * ratio, 0)

    def _advantage(self, reward: Array, counted: Array) -> Array:
        if self.discount == 0:
            return reward
        total = _discounted(reward, self.discount)
        if not self.length_normalised:
            return total
        return total / jnp.maximum(_discounted(counted, self.discount), 1e-4)


def _discounted(x: Float[Array, "batch seq"], discount: float) -> Array:
    """Sum over i >= t of discount**(i - t) x_i at every t."""

    def back(after: Array, here: Array) -> tuple[Array, Array]:
        total = here + discount * after
        return total, total

    zeros = jnp.zeros_like(x[:, 0])
    _, totals = lax.scan(back, zeros, jnp.moveaxis(x, 1, 0), reverse=True)
    return jnp.moveaxis(totals, 0, 1)
