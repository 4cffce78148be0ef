"""Teachers kept small: the top k with its tail, and tokens drawn with weights."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, Key

from dew.losses.logspace import Scalar, log1mexp, log_softmax, widened
from dew.losses.scores import (
    Pair,
    TokenPair,
    bucketed,
    clamped_k,
    log_sum_outside,
    soft_cross_entropy,
)
from dew.losses.vocabulary import VocabularyMap


@struct.dataclass
class TopKScores:
    """The likeliest classes of each position, and the log of the mass of the others.

    A slot with log-probability minus infinity is unused. `temperature` is the one that
    the log-probabilities were taken at: a distribution with a tail has no exact form at
    another one, so a term that asks for another is refused.
    """

    ids: Int[Array, "*batch k"]
    log_probs: Float[Array, "*batch k"]
    tail: Float[Array, "*batch"]
    temperature: float = struct.field(pytree_node=False, default=1.0)
    vocabulary: VocabularyMap | None = struct.field(pytree_node=False, default=None)

    def paired_log_probs(
        self,
        student: Float[Array, "*batch rows"],
        temperature: Scalar,
        top: int | None = None,
    ) -> Pair:
        """The kept classes, or the first `top` of them, and the bucket."""
        _check_temperature(self.temperature, temperature)
        ids, log_probs = self.ids, widened(self.log_probs)
        tail = widened(self.tail)[..., None]
        if self.vocabulary is not None:
            student = self.vocabulary.student_classes(student, temperature)
            ids = self.vocabulary.class_of_teacher(ids)
            # What the student has no class for joins the bucket.
            lost = jnp.where(ids < 0, log_probs, -jnp.inf)
            tail = jnp.concatenate([tail, lost], axis=-1)
            log_probs = jnp.where(ids < 0, -jnp.inf, log_probs)
            ids = jnp.maximum(ids, 0)
        if top is not None:
            top = clamped_k(top, ids.shape[-1])
            log_probs, slots = lax.top_k(log_probs, log_probs.shape[-1])
            ids = jnp.take_along_axis(ids, slots, axis=-1)[..., :top]
            tail = jnp.concatenate([tail, log_probs[..., top:]], axis=-1)
            log_probs = log_probs[..., :top]
        s = log_softmax(student, temperature)
        return bucketed(ids, log_probs, jax.nn.logsumexp(tail, axis=-1), s)

    def cross_entropy(
        self, student: Float[Array, "*batch rows"], temperature: Scalar
    ) -> Float[Array, "*batch"]:
        """Minus the sum of p log q over the kept classes and the bucket."""
        return soft_cross_entropy(*self.paired_log_probs(student, temperature))

    def argmax_tokens(self, student: Float[Array, "*batch rows"]) -> TokenPair:
        """The likeliest kept class, and the student's likeliest of all."""
        ids = self.ids
        if self.vocabulary is not None:
            student = self.vocabulary.student_classes(student)
            ids = self.vocabulary.class_of_teacher(ids)
        slot = jnp.argmax(self.log_probs, axis=-1)[..., None]
        first = jnp.take_along_axis(ids, slot, axis=-1)[..., 0]
        return first, jnp.argmax(student, axis=-1)


@struct.dataclass
class SampledScores:
    """Tokens drawn from the teacher, each with the weight that makes the draw unbiased.

    The same token may be drawn twice; its weights add. A weight of 0 is an unused slot.
    """

    ids: Int[Array, "*batch draws"]
    weights: Float[Array, "*batch draws"]
    temperature: float = struct.field(pytree_node=False, default=1.0)
    vocabulary: VocabularyMap | None = struct.field(pytree_node=False, default=None)

    def cross_entropy(
        self, student: Float[Array, "*batch rows"], temperature: Scalar
    ) -> Float[Array, "*batch"]:
        """Minus the weighted sum of log q; its mean over draws is the full one."""
        _check_temperature(self.temperature, temperature)
        ids, weights = self.ids, self.weights
        if self.vocabulary is not None:
            student = self.vocabulary.student_classes(student, temperature)
            ids = self.vocabulary.class_of_teacher(ids)
            weights = jnp.where(ids < 0, 0, weights)
            ids = jnp.maximum(ids, 0)
        log_q = jnp.take_along_axis(log_softmax(student, temperature), ids, axis=-1)
        weights = lax.stop_gradient(weights.astype(log_q.dtype))
        drawn = weights > 0
        return -jnp.sum(
            jnp.where(drawn, weights * jnp.where(drawn, log_q, 0), 0), axis=-1
        )


def top_k(
    logits: Float[Array, "*batch vocab"], k: int, *, temperature: float = 1.0
) -> TopKScores:
    """The `k` likeliest classes after tempering, in falling order, and their tail.

    All classes where there are fewer than `k`.
    """
    log_probs = log_softmax(lax.stop_gradient(logits), temperature)
    kept, ids = lax.top_k(log_probs, clamped_k(k, logits.shape[-1]))
    tail = log_sum_outside(log_probs, ids, kept)
    return TopKScores(ids=ids, log_probs=kept, tail=tail, temperature=temperature)


def top_k_without_tail(
    ids: Int[Array, "*batch k"],
    log_probs: Float[Array, "*batch k"],
    *,
    temperature: float = 1.0,
) -> TopKScores:
    """The form of a cache that stored no tail: what the kept lack to a sum of one."""
    log_probs = widened(log_probs)
    tail = log1mexp(jax.nn.logsumexp(log_probs, axis=-1))
    return TopKScores(ids=ids, log_probs=log_probs, tail=tail, temperature=temperature)


def tempered(scores: TopKScores, temperature: float, *, num_classes: int) -> TopKScores:
    """Moves old scores to another temperature: p to the power T1/T2, renormalised.

    Exact where the tail is empty. Otherwise the tail is taken as spread evenly over the
    classes not kept, so it is an estimate: prefer writing the cache anew.
    """
    power = scores.temperature / temperature
    log_probs, tail = widened(scores.log_probs), widened(scores.tail)[..., None]
    left = max(num_classes - scores.ids.shape[-1], 1)
    spread = jnp.log(jnp.asarray(left, tail.dtype))
    tail = (tail - spread) * power + spread
    raised = jnp.concatenate([log_probs * power, tail], axis=-1)
    raised = jax.nn.log_softmax(raised, axis=-1, where=raised > -jnp.inf)
    return TopKScores(
        ids=scores.ids,
        log_probs=raised[..., :-1],
        tail=raised[..., -1],
        temperature=temperature,
        vocabulary=scores.vocabulary,
    )


def draw(
    key: Key[Array, ""],
    logits: Float[Array, "*batch vocab"],
    draws: int,
    *,
    proposal_power: float = 1.0,
    self_normalised: bool = False,
    temperature: float = 1.0,
) -> SampledScores:
    """Draws tokens from r ~ p^`proposal_power`, weighted p / (draws * r).

    Unbiased for any power; at 1 the weights are counts over draws. `self_normalised`
    weights sum to one, which trades that for a smaller variance. Anshumann et al.,
    "Sparse Logit Sampling: Accelerating Knowledge Distillation in LLMs" (2025).
    """
    log_p = log_softmax(lax.stop_gradient(logits), temperature)
    exists = log_p > -jnp.inf
    power = jnp.where(exists, jnp.where(exists, log_p, 0) * proposal_power, -jnp.inf)
    log_r = jax.nn.log_softmax(power, axis=-1, where=exists)
    ids = jax.random.categorical(key, log_r, shape=(draws, *log_p.shape[:-1]))
    ids = jnp.moveaxis(ids, 0, -1)
    log_weights = jnp.take_along_axis(log_p, ids, axis=-1) - jnp.take_along_axis(
        log_r, ids, axis=-1
    )
    weights = jnp.exp(log_weights) / draws
    if self_normalised:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return SampledScores(ids=ids, weights=weights, temperature=temperature)


def _check_temperature(stored: float, asked: Any) -> None:
    if not isinstance(asked, int | float) or stored != asked:
        raise ValueError(
            f"these scores were taken at temperature {stored}, the term asks for "
            f"{asked}; set the term's temperature to {stored}, write the cache anew, "
            "or estimate with dew.losses.sparse_scores.tempered"
        )
