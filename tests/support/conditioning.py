"""Whether a text can hold two models against each other: what rounding makes of it.

Where two experts score the same but for a rounding, or a sum nearly cancels, two
correct float32 models differ on a text. The reference alone shows it, by how far it
moves when its weights move a little. A text on which ours is over the bar is left for
another if the reference moves too far there, and stands if it does not.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Says = Callable[[Any], Sequence[np.ndarray]]
"""What a torch model says of a text: its logits, or its gradients."""

STEP = 2.0**-16
DRAWS = 8
TEXTS = 4

FAIR = 64.0
"""The most that a relative change of all weights may come back as. Families' texts have
from 3 to 42; two near ties and the one sum that nearly cancels, from 150 to 15,000."""


def moved(model: Any, seed: int, step: float) -> Any:
    """A copy whose weights are each a normal number of steps from where they were."""
    drawn = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + step * torch.randn(parameter.shape, generator=drawn))
    return other


def condition(model: Any, says: Says) -> float:
    """The largest move of what a model says, as a part of the largest, per step.

    Weights move both ways, so that an exact tie falls once to either side.
    """
    largest = 0.0
    for seed in range(DRAWS):
        up, down = (says(moved(model, seed, sign * STEP)) for sign in (1, -1))
        most = max(float(np.abs(a).max()) for a in up)
        apart = max(float(np.abs(a - b).max()) for a, b in zip(up, down, strict=True))
        largest = max(largest, apart / most / (2 * STEP))
    return largest


def on_a_fair_text(
    bar: float,
    difference: Callable[[int], float],
    conditioned: Callable[[int], float],
) -> float:
    """The difference on the first text that is within the bar, or that is fair.

    Both are asked for texts by their seeds, and `conditioned` only if the difference is
    over the bar. It is infinite where no text is fair.
    """
    for seed in range(TEXTS):
        found = difference(seed)
        if found <= bar or conditioned(seed) < FAIR:
            return found
    return float("inf")
