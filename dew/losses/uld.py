"""Distillation across tokenizers: match sorted probabilities, span by span.

Boizard et al., "Towards Cross-Tokenizer Distillation: the Universal Logit Distillation
Loss for LLMs" (2024). Two tokenizers cut the same text at different places; positions
are paired where both cut at the same byte. A span between two such cuts may hold
several tokens of either side: its distribution is that of its first token, times the
probability that the side gives to the tokens that follow in it.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dew.losses.logspace import Scalar, log_softmax
from dew.losses.scores import OwnProbabilities, own_probabilities
from dew.losses.term import Schedule, Term, TermInputs, at, check_positive


@struct.dataclass
class Spans:
    """Pairs of positions that predict the same bytes, `dew.data.token_spans`."""

    starts: Bool[Array, "batch seq"]
    teacher_at: Int[Array, "batch seq"]
    student_span: Int[Array, "batch seq"]
    teacher_span: Int[Array, "batch seq2"]


@struct.dataclass
class SpanScores:
    """Logits of a teacher that reads the text in its own tokens."""

    logits: Float[Array, "batch seq2 vocab2"]
    labels: Int[Array, "batch seq2"]
    spans: Spans

    def own_probs(
        self,
        student: Float[Array, "batch seq vocab"],
        temperature: Scalar,
        labels: Int[Array, "batch seq"] | None,
    ) -> tuple[Float[Array, "batch seq vocab2"], Float[Array, "batch seq vocab"]]:
        """Probabilities of spans, zero at positions that start none."""
        if labels is None:
            raise ValueError(
                "ULD across tokenizers needs the student's labels, got None"
            )
        spans = self.spans
        log_q = log_softmax(student, temperature)
        log_p = log_softmax(lax.stop_gradient(self.logits), temperature)
        starts = _starts(spans.teacher_span)
        log_p = log_p + _followers(log_p, self.labels, spans.teacher_span, starts)
        log_q = log_q + _followers(log_q, labels, spans.student_span, spans.starts)
        theirs = jnp.take_along_axis(log_p, spans.teacher_at[..., None], axis=1)
        seen = spans.starts[..., None]
        return jnp.where(seen, jnp.exp(theirs), 0), jnp.where(seen, jnp.exp(log_q), 0)


@dataclass(frozen=True, kw_only=True)
class ULD(Term[TermInputs]):
    """The sum over ranks of |sorted p - sorted q|, the shorter side padded with zeros.

    Blind to which token is which: 0 whenever one side is a relabelling of the other. At
    most 2.
    """

    needs_scores: ClassVar[type | None] = OwnProbabilities
    whole_sequence: ClassVar[bool] = True

    temperature: Schedule = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "temperature", self.temperature)

    def values(self, inputs: TermInputs) -> Float[Array, "*batch"]:
        """The distance at every position; with spans, at the first of each."""
        temperature = at(self.temperature, inputs.step)
        teacher = own_probabilities(self, inputs.teacher)
        p, q = teacher.own_probs(inputs.student, temperature, inputs.labels)
        p, q = _ranked(p), _ranked(q)
        width = max(p.shape[-1], q.shape[-1])
        return jnp.sum(jnp.abs(_padded(p, width) - _padded(q, width)), axis=-1)


def _starts(span: Int[Array, "batch seq"]) -> Bool[Array, "batch seq"]:
    before = jnp.concatenate([jnp.full_like(span[:, :1], -1), span[:, :-1]], axis=1)
    return (span >= 0) & (span != before)


def _followers(
    log_probs: Float[Array, "batch seq vocab"],
    labels: Int[Array, "batch seq"],
    span: Int[Array, "batch seq"],
    starts: Bool[Array, "batch seq"],
) -> Float[Array, "batch seq 1"]:
    """Log-probability of the tokens of each position's span after its first."""
    chosen = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
    counted = jnp.where((span >= 0) & ~starts, chosen, 0)
    row = jnp.arange(span.shape[0])[:, None]
    # Span numbers never reach the length of the row; the last slot takes the strays.
    slot = jnp.where(span < 0, span.shape[1], span)
    sums = jnp.zeros((span.shape[0], span.shape[1] + 1), counted.dtype)
    sums = sums.at[row, slot].add(counted)
    return jnp.where(span < 0, 0, sums[row, slot])[..., None]


def _ranked(probs: Float[Array, "*batch vocab"]) -> Float[Array, "*batch vocab"]:
    return jnp.sort(probs, axis=-1, descending=True)


def _padded(probs: Array, width: int) -> Array:
    missing = width - probs.shape[-1]
    return jnp.pad(probs, [*[(0, 0)] * (probs.ndim - 1), (0, missing)])
