"""How far a prediction is from its label."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from dew.tree import widen


@dataclass(frozen=True, kw_only=True)
class Classification:
    """-log softmax(logits) of the label, as torch's `CrossEntropyLoss` reckons it.

    `smoothing` spreads that part of the label evenly over all classes. With
    `class_weights`, each class's terms are multiplied by its weight, and the mean is
    over the weights of the labels. Negative labels do not count.
    """

    smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ValueError(
                f"Classification.smoothing must be in [0, 1), got {self.smoothing}"
            )

    def __call__(
        self, logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]
    ) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
        """Loss of each example over its weight, and that weight."""
        logs = jax.nn.log_softmax(logits, axis=-1)
        of_class = jnp.ones(logs.shape[-1], logs.dtype)
        if self.class_weights is not None:
            of_class = jnp.asarray(self.class_weights, logs.dtype)
        label = jnp.maximum(labels, 0)
        weights = jnp.where(labels >= 0, of_class[label], 0)
        chosen = jnp.take_along_axis(logs, label[:, None], axis=-1)[:, 0]
        even = jnp.mean(logs * of_class[None], axis=-1)
        losses = (self.smoothing - 1) * chosen * weights - self.smoothing * even
        return losses / jnp.where(weights > 0, weights, 1), weights


@dataclass(frozen=True, kw_only=True)
class Regression:
    """The mean over targets of (logit - label)², or of its absolute value."""

    distance: Literal["squared", "absolute"] = "squared"

    def __call__(
        self, logits: Float[Array, "batch *targets"], labels: Num[Array, "batch *any"]
    ) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
        """Loss of each example, and weight 1."""
        gap = logits - widen(labels).reshape(logits.shape)
        gap = jnp.square(gap) if self.distance == "squared" else jnp.abs(gap)
        losses = jnp.mean(gap.reshape(gap.shape[0], -1), axis=-1)
        return losses, jnp.ones_like(losses)
