"""Validation metrics: perplexity, nats per token, mean loss and accuracy."""

import math
import sys

import numpy as np

from dew.objectives.base import Mean, mean_of_totals, merge_totals
from dew.objectives.supervised import LabelScores
from dew.objectives.tokens import TokenScores

LARGEST_EXPONENT = math.log(sys.float_info.max)
"""Largest number, 709.78, whose exponential is a float."""


class NatsPerToken:
    """The mean loss over every token of the pass, in nats.

    Batches are weighed by their tokens: it is not the mean of the batches' means.
    """

    reads = TokenScores

    def __call__(self, artifact: TokenScores, /) -> tuple[float, float]:
        """Summed loss and number of tokens of one batch."""
        # Python floats are float64, so a pass of many batches is summed without the
        # rounding of float32.
        stats = Mean.of(artifact.losses, artifact.weights)
        return float(stats.total), float(stats.mass)

    merge = staticmethod(merge_totals)

    def finalize(self, accumulated: tuple[float, float], /) -> float:
        """The pass's mean loss in nats per token."""
        return mean_of_totals(accumulated)


class Perplexity(NatsPerToken):
    """exp of the mean loss over every token of the pass."""

    def finalize(self, accumulated: tuple[float, float], /) -> float:
        """The pass's perplexity, exp of its nats per token."""
        nats = mean_of_totals(accumulated)
        # Beyond 709 nats it is more than a float can hold.
        return math.exp(nats) if nats < LARGEST_EXPONENT else nats * math.inf


class TokenCount(NatsPerToken):
    """The number of tokens predicted in a pass."""

    def finalize(self, accumulated: tuple[float, float], /) -> float:
        """The pass's number of predicted tokens."""
        return accumulated[1]


def token_metrics() -> dict[str, NatsPerToken]:
    """The metrics of a language model by the names under which they are reported.

    >>> scores = TokenScores(np.full((2, 3), 0.5), np.ones((2, 3)))
    >>> for name, metric in token_metrics().items():
    ...     print(name, round(metric.finalize(metric(scores)), 4))
    perplexity 1.6487
    nats_per_token 0.5
    tokens 6.0
    """
    return {
        "perplexity": Perplexity(),
        "nats_per_token": NatsPerToken(),
        "tokens": TokenCount(),
    }


class MeanLoss:
    """The weighted mean loss of all examples of a pass."""

    reads = LabelScores

    def __call__(self, artifact: LabelScores, /) -> tuple[float, float]:
        """Summed loss and weight of one batch."""
        stats = Mean.of(artifact.losses, artifact.weights)
        return float(stats.total), float(stats.mass)

    merge = staticmethod(merge_totals)

    def finalize(self, accumulated: tuple[float, float], /) -> float:
        """The pass's loss per unit of weight."""
        return mean_of_totals(accumulated)


class Accuracy(MeanLoss):
    """The share of counted examples whose label has the highest logit."""

    def __call__(self, artifact: LabelScores, /) -> tuple[float, float]:
        """Number of correct and of counted examples of one batch."""
        # An example counts once whatever its weight: class weights shape the loss only.
        counted = np.asarray(artifact.weights) > 0
        correct = np.argmax(artifact.logits, axis=-1) == np.asarray(artifact.labels)
        return float(np.sum(correct & counted)), float(np.sum(counted))
