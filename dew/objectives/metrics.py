"""What a validation pass comes to, for the objectives that score examples."""

import math

import numpy as np

from dew.objectives.base import Mean, mean_of_totals, merge_totals
from dew.objectives.supervised import LabelScores
from dew.objectives.tokens import TokenScores


class NatsPerToken:
    """The mean loss over every token of the pass, never a mean of means."""

    reads = TokenScores

    def __call__(self, artifact: TokenScores, /) -> tuple[float, float]:
        """Summed loss and number of tokens of one batch."""
        stats = Mean.of(artifact.losses, artifact.weights)
        return float(stats.total), float(stats.mass)

    merge = staticmethod(merge_totals)

    def finalize(self, accumulated: tuple[float, float], /) -> float:
        """Nats per token."""
        return mean_of_totals(accumulated)


class Perplexity(NatsPerToken):
    """exp of the mean loss over every token of the pass."""

    def finalize(self, accumulated: tuple[float, float], /) -> float:
        """Perplexity per token."""
        return math.exp(mean_of_totals(accumulated))


class TokenCount(NatsPerToken):
    """How many tokens a pass predicted."""

    def finalize(self, accumulated: tuple[float, float], /) -> float:
        """Tokens."""
        return accumulated[1]


def token_metrics() -> dict[str, NatsPerToken]:
    """The metrics of a language model by the names they are reported under."""
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
        """Loss per unit of weight."""
        return mean_of_totals(accumulated)


class Accuracy(MeanLoss):
    """The part of the examples that count whose label has the highest logit."""

    def __call__(self, artifact: LabelScores, /) -> tuple[float, float]:
        """Right and counted examples of one batch."""
        counted = np.asarray(artifact.weights) > 0
        right = np.argmax(artifact.logits, axis=-1) == np.asarray(artifact.labels)
        return float(np.sum(right & counted)), float(np.sum(counted))
