"""What a validation pass comes to, for the objectives that score examples."""

import numpy as np

from dew.objectives.base import Mean, mean_of_totals, merge_totals
from dew.objectives.supervised import LabelScores


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
