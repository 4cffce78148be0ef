"""The loss of the student's own objective, as a term beside those of a teacher."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Array, Float

from dew.losses.term import LossInputs, Reads, Term


@dataclass(frozen=True, kw_only=True)
class StudentLoss(Term[LossInputs]):
    """The loss that the student's own objective computes, whatever it consists of.

    Label smoothing, a z-loss, a router's auxiliary loss and class weights are included,
    and no labels are needed: the value is the student's own mean, over the mass of all
    other terms. For a causal language model it equals `CrossEntropy`, which can be
    computed in chunks; this term needs all of the student's logits at a time.

    >>> import jax.numpy as jnp
    >>> StudentLoss(weight=0.5).values(LossInputs(jnp.asarray([[2.0, 3.0]]))).tolist()
    [[2.0, 3.0]]
    """

    reads: ClassVar[Reads] = "loss"
    student_only: ClassVar[bool] = True

    def values(self, inputs: LossInputs) -> Float[Array, "*batch"]:
        """Returns the loss of every position, unchanged."""
        return inputs.losses
