"""Distillation losses in float64 numpy, from the formulas, and inputs for them."""

from collections.abc import Callable

import numpy as np
from scipy import special

VOCAB = 50


def pair(seed: int = 0, seq: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Teacher and student logits of standard deviation 2, as far apart as chance."""
    rng = np.random.default_rng(seed)
    shape = (2, seq, VOCAB)
    return 2 * rng.normal(size=shape), 2 * rng.normal(size=shape)


def log_softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities in the inputs' own precision."""
    return special.log_softmax(logits / temperature, axis=-1)


def kl(a: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Relative entropy of probabilities from scipy, where 0 log 0 is 0."""
    return special.rel_entr(np.exp(a), np.exp(s)).sum(-1)


def forward_kl(z: np.ndarray, y: np.ndarray, t: float = 1.0) -> np.ndarray:
    """T squared times KL(P/Q)."""
    return t**2 * kl(log_softmax(z, t), log_softmax(y, t))


def reverse_kl(z: np.ndarray, y: np.ndarray, t: float = 1.0) -> np.ndarray:
    """T squared times KL(Q/P)."""
    return forward_kl(y, z, t)


def jsd(z: np.ndarray, y: np.ndarray, beta: float, t: float = 1.0) -> np.ndarray:
    """The raw JSD of M = beta P + (1 - beta) Q, without T squared."""
    a, s = log_softmax(z, t), log_softmax(y, t)
    m = np.logaddexp(a + np.log(beta), s + np.log1p(-beta))
    return beta * kl(a, m) + (1 - beta) * kl(s, m)


def skew(z: np.ndarray, y: np.ndarray, share: float, direction: str) -> np.ndarray:
    """KL to a mixture holding `share` of the first argument."""
    a, s = log_softmax(z), log_softmax(y)
    if direction == "reverse":
        a, s = s, a
    return kl(a, np.log(share * np.exp(a) + (1 - share) * np.exp(s)))


def tail_kl(z: np.ndarray, y: np.ndarray, k: int) -> np.ndarray:
    """KL over the teacher's top k and one bucket, position by position."""
    sides = (log_softmax(x).reshape(-1, VOCAB) for x in (z, y))
    out = []
    for a, s in zip(*sides, strict=True):
        order = np.argsort(-a)
        top, rest = order[:k], order[k:]
        p = np.append(np.exp(a[top]), np.exp(a[rest]).sum())
        q = np.append(np.exp(s[top]), np.exp(s[rest]).sum())
        out.append((p * (np.log(p) - np.log(q)))[p > 0].sum())
    return np.array(out).reshape(z.shape[:-1])


def entropy(log_probs: np.ndarray) -> np.ndarray:
    """Nats."""
    return -(np.exp(log_probs) * log_probs).sum(-1)


def central_difference(
    fn: Callable, y: np.ndarray, direction: np.ndarray, size: float
) -> float:
    """The slope of a scalar function at `y` along a unit `direction`."""
    return float((fn(y + size * direction) - fn(y - size * direction)) / (2 * size))
