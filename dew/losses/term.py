"""The interface of a loss term, the records it reads, and scheduled weights."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeAlias

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import TypeVar

from dew.losses.logspace import Scalar
from dew.losses.scores import Scores

Schedule: TypeAlias = float | Callable[[Array], ArrayLike]
"""A constant, or a function of the count of accepted micro-batches."""

Reads: TypeAlias = Literal["logits", "hidden", "attention", "loss"]
"""What a term reads: scores of tokens, hidden states, attention scores, or the loss
that the student's own objective computes."""


def at(schedule: Schedule, step: int | Int[Array, ""]) -> Scalar:
    """Returns the schedule's value at `step`; a constant stays a Python number."""
    if callable(schedule):
        return jnp.asarray(schedule(jnp.asarray(step)))
    return schedule


@dataclass(frozen=True)
class TermInputs:
    """The inputs of a term over logits, at positions of any layout.

    Attributes:
        student: the student's logits.
        teacher: the teacher's scores of the same positions; None where the term is the
            student's alone.
        labels: the tokens that the positions predict, where the term needs them.
        mask: True at positions that count; only a term over whole sequences reads it.
        step: the count of accepted micro-batches, for schedules.
    """

    student: Float[Array, "*batch vocab"]
    teacher: Scores | None = None
    labels: Int[Array, "*batch"] | None = field(default=None, kw_only=True)
    mask: Bool[Array, "*batch"] | None = field(default=None, kw_only=True)
    step: int | Int[Array, ""] = field(default=0, kw_only=True)


@dataclass(frozen=True)
class StateInputs:
    """The inputs of a term over hidden states or attention, one per layer pair.

    Attributes:
        student: hidden states [batch, seq, embed], or attention scores or maps
            [batch, heads, queries, keys], of the student's paired layers.
        teacher: those of the teacher's paired layers.
        visible: True where a query (row) may attend to a key (column); needed by terms
            over whole sequences.
        projectors: for each pair a matrix from the student's width to the teacher's,
            or None; () projects no pair.
    """

    student: Sequence[Float[Array, "batch ..."]]
    teacher: Sequence[Float[Array, "batch ..."]]
    visible: Bool[Array, "batch seq seq"] | None = field(default=None, kw_only=True)
    projectors: Sequence[Float[Array, "_ _"] | None] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class LossInputs:
    """The input of a term on the loss that the student's objective computes itself.

    Attributes:
        losses: the loss of every position; what belongs to no position, as an auxiliary
            loss, is spread evenly over those that count.
    """

    losses: Float[Array, "*batch"]


Inputs = TypeVar("Inputs", default=Any)


@dataclass(frozen=True, kw_only=True)
class Term(ABC, Generic[Inputs]):
    """A loss of every position, to be summed with the weights of its positions.

    Class attributes declare what a term reads, so that an objective computes no more
    than its terms need.

    Attributes:
        weight: the factor of the term's sum in the loss; the reported value is without.
        reads: logits, hidden states, attention scores, or the student's own loss.
        needs_scores: the protocol that the teacher's scores must fulfil, None if they
            are not read.
        needs_labels: whether `values` reads the labels.
        whole_sequence: whether the value of a position depends on other positions, so
            that a sequence cannot be cut into chunks for it.
        student_only: whether the teacher is ignored, so that a term counts once however
            many teachers there are.
    """

    reads: ClassVar[Reads] = "logits"
    needs_scores: ClassVar[type | None] = None
    needs_labels: ClassVar[bool] = False
    whole_sequence: ClassVar[bool] = False
    student_only: ClassVar[bool] = False

    weight: Schedule = 1.0

    @abstractmethod
    def values(self, inputs: Inputs) -> Float[Array, "*batch"]:
        """Returns the loss of every position, in float32 or wider.

        Terms over logits are in nats unless they say otherwise.
        """


def check_positive(owner: object, name: str, value: Schedule) -> None:
    """Refuses a constant that is not above zero; schedules are not checked.

    Raises:
        ValueError: the constant is zero or less.
    """
    if not callable(value) and not value > 0:
        raise ValueError(f"{type(owner).__name__}.{name} must be > 0, got {value!r}")


def check_share(owner: object, name: str, value: Schedule) -> None:
    """Refuses a constant outside [0, 1]; schedules are not checked.

    Raises:
        ValueError: the constant lies outside.
    """
    if not callable(value) and not 0 <= value <= 1:
        raise ValueError(
            f"{type(owner).__name__}.{name} must be in [0, 1], got {value!r}"
        )


def names(terms: Sequence[Term]) -> list[str]:
    """Returns each term's class name in snake case, numbered where it occurs twice."""
    plain = [_snake(type(term).__name__) for term in terms]
    return [
        f"{name}_{plain[: i + 1].count(name)}" if plain.count(name) > 1 else name
        for i, name in enumerate(plain)
    ]


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
