"""The textbook formulas in float64 numpy, for checks: nothing here is clever.

P is the teacher, Q the student. They share no line with the losses they check.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dew.losses.divergences import (
    TVD,
    CrossEntropy,
    ForwardKL,
    ReverseKL,
    ScaledJSD,
    SkewKL,
    SoftCrossEntropy,
)


def reference(
    term: Any, teacher: np.ndarray, student: np.ndarray, labels: np.ndarray
) -> np.ndarray | None:
    """The term's weighted value at every position, None where there is no formula.

    Both sides are logits over common classes, [positions, classes].
    """
    for kind in type(term).__mro__:
        if kind in FORMULAS and not callable(term.weight):
            return term.weight * FORMULAS[kind](term, teacher, student, labels)
    return None


def log_softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of the logits, in float64."""
    scaled = logits / temperature
    peak = scaled.max(-1, keepdims=True)
    return scaled - peak - np.log(np.exp(scaled - peak).sum(-1, keepdims=True))


def kl(a: np.ndarray, s: np.ndarray) -> np.ndarray:
    """The sum of p (log p - log q), with 0 log 0 = 0."""
    with np.errstate(invalid="ignore"):
        return np.where(np.exp(a) > 0, np.exp(a) * (a - s), 0).sum(-1)


Formula = Callable[[Any, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Of a term, both sides' logits and the labels."""


def _tempered(of: Callable[[Any, np.ndarray, np.ndarray], np.ndarray]) -> Formula:
    """A formula of log-probabilities as one of logits, at the term's temperature."""

    def formula(
        term: Any, teacher: np.ndarray, student: np.ndarray, labels: np.ndarray
    ) -> np.ndarray:
        t = term.temperature
        factor = t**2 if term.t_squared else 1.0
        return factor * of(term, log_softmax(teacher, t), log_softmax(student, t))

    return formula


def _jsd(term: Any, a: np.ndarray, s: np.ndarray) -> np.ndarray:
    beta = term.beta
    m = np.log(beta * np.exp(a) + (1 - beta) * np.exp(s))
    raw = beta * kl(a, m) + (1 - beta) * kl(s, m)
    return raw if term.raw else raw / (beta * (1 - beta))


def _skew(term: Any, a: np.ndarray, s: np.ndarray) -> np.ndarray:
    first, second = (a, s) if term.direction == "forward" else (s, a)
    mixed = term.skew * np.exp(first) + (1 - term.skew) * np.exp(second)
    return kl(first, np.log(mixed))


def _cross_entropy(
    term: Any, teacher: np.ndarray, student: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    return -np.take_along_axis(log_softmax(student), labels[..., None], -1)[..., 0]


FORMULAS: Mapping[type, Formula] = {
    ForwardKL: _tempered(lambda term, a, s: kl(a, s)),
    ReverseKL: _tempered(lambda term, a, s: kl(s, a)),
    ScaledJSD: _tempered(_jsd),
    SkewKL: _tempered(_skew),
    TVD: _tempered(lambda term, a, s: np.abs(np.exp(a) - np.exp(s)).sum(-1) / 2),
    SoftCrossEntropy: _tempered(lambda term, a, s: -(np.exp(a) * s).sum(-1)),
    CrossEntropy: _cross_entropy,
}
"""By the term's class; a class below one of these is held to the same formula."""
