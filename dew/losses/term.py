"""What a loss term is, and numbers that may follow a schedule."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from dew.losses.logspace import Scalar
from dew.losses.scores import Scores

Schedule: TypeAlias = float | Callable[[Array], ArrayLike]
"""A constant, or a function of the count of accepted microbatches."""


def at(schedule: Schedule, step: int | Int[Array, ""]) -> Scalar:
    """The schedule's value at `step`; a constant stays a Python number."""
    if callable(schedule):
        return jnp.asarray(schedule(jnp.asarray(step)))
    return schedule


@runtime_checkable
class Term(Protocol):
    """A loss of every position, to be summed with the weights of its positions.

    `weight` multiplies the sum, never the reported value.
    """

    @property
    def weight(self) -> Schedule:
        """What the term counts for in the objective."""
        ...

    def values(
        self,
        student: Float[Array, "batch seq vocab"],
        teacher: Scores,
        *,
        labels: Int[Array, "batch seq"] | None = None,
        mask: Bool[Array, "batch seq"] | None = None,
        step: int | Int[Array, ""] = 0,
    ) -> Float[Array, "batch seq"]:
        """The loss of every position, in nats, in float32 or wider.

        `labels` are the tokens that the positions predict. `mask` marks the positions
        that count; only a term that looks at a whole sequence reads it.
        """
        ...


def check_positive(owner: object, name: str, value: Schedule) -> None:
    """Refuses a constant that is not above zero; a schedule is checked by nobody.

    Raises:
        ValueError: it is zero or less.
    """
    if not callable(value) and not value > 0:
        raise ValueError(f"{type(owner).__name__}.{name} must be > 0, got {value!r}")


def check_share(owner: object, name: str, value: Schedule) -> None:
    """Refuses a constant outside [0, 1].

    Raises:
        ValueError: it lies outside.
    """
    if not callable(value) and not 0 <= value <= 1:
        raise ValueError(
            f"{type(owner).__name__}.{name} must be in [0, 1], got {value!r}"
        )


def names(terms: Sequence[Any]) -> list[str]:
    """A name for each term: its class in snake case, numbered where it is not alone."""
    plain = [_snake(type(term).__name__) for term in terms]
    return [
        f"{name}_{plain[: i + 1].count(name)}" if plain.count(name) > 1 else name
        for i, name in enumerate(plain)
    ]


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
