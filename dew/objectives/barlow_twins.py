"""Barlow Twins: the cross-correlation of two views' embeddings against identity."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct
from jaxtyping import Array, Float

from dew.objectives.base import Aux, InputSpec, Step
from dew.objectives.masking import without_uncounted
from dew.objectives.model import ModelObjective
from dew.typing import Batch, Variables


@no_type_check
@struct.dataclass
class CrossMoments:
    """Sums over records that determine the correlation between two views."""

    count: Float[Array, ""]
    sums: Float[Array, "2 dim"]
    squares: Float[Array, "2 dim"]
    products: Float[Array, "dim dim"]


@dataclass(frozen=True, kw_only=True, eq=False)
class BarlowTwins(ModelObjective[CrossMoments]):
    """Σ (1 - Cᵢᵢ)² + redundancy · Σ Cᵢⱼ², C the correlation between two views.

    Zbontar et al., "Barlow Twins" (2021), equation 1. Unlike the softmax over pairs of
    a contrastive loss, whose terms couple every record with every other, a correlation
    is a function of sums over records; so the value of an accumulated window, and its
    gradient, are those of one large batch.

    Each input that `reads` names has a second axis of two views, [batch, 2, …];
    `loss_mask` [batch] marks records that count. The model's logits [rows, dim] are its
    embeddings.
    """

    reads: InputSpec
    redundancy: float = 0.005
    eps: float = 1e-5

    @property
    def inputs(self) -> InputSpec:
        """Shapes and dtypes of one view's inputs."""
        return self.reads

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[CrossMoments, Aux[None]]:
        """The sums of both views' embeddings, of their squares and products."""
        # One pass over both views, interleaved: rows 2i and 2i + 1 are views of record
        # i, so a batch split over devices keeps a record's views on one device.
        records = {name: batch[name] for name in self.reads}
        if "loss_mask" in batch:
            records = without_uncounted(records, batch["loss_mask"].astype(bool))
        views = {n: rearrange(x, "b v ... -> (b v) ...") for n, x in records.items()}
        outputs, _ = self.forward(params, views, step, train=True)
        pairs = rearrange(self.logits(outputs), "(b v) d -> v b d", v=2)
        weights = jnp.ones(pairs.shape[1], pairs.dtype)
        if "loss_mask" in batch:
            weights = batch["loss_mask"].astype(pairs.dtype)
        stats = CrossMoments(
            count=jnp.sum(weights),
            sums=jnp.einsum("b,vbd->vd", weights, pairs),
            squares=jnp.einsum("b,vbd->vd", weights, jnp.square(pairs)),
            products=jnp.einsum("b,bi,bj->ij", weights, pairs[0], pairs[1]),
        )
        return stats, Aux()

    def reduce_loss(self, stats: CrossMoments) -> tuple[jax.Array, jax.Array]:
        """The value of the pooled moments; a correlation needs two records."""
        active = stats.count > 1
        # Without support the divisor is 1, so that the branch not taken has a finite
        # gradient: `where` multiplies it by zero, which leaves a NaN a NaN.
        count = jnp.where(active, stats.count, 1)
        means = stats.sums / count
        # `eps` under the root keeps a collapsed dimension, of variance 0, finite.
        scales = jax.lax.rsqrt(stats.squares / count - jnp.square(means) + self.eps)
        covariance = stats.products / count - jnp.outer(means[0], means[1])
        correlation = covariance * jnp.outer(scales[0], scales[1])
        on = jnp.diagonal(correlation)
        off = jnp.sum(jnp.square(correlation)) - jnp.sum(jnp.square(on))
        value = jnp.sum(jnp.square(1 - on)) + self.redundancy * off
        return jnp.where(active, value, 0), active
