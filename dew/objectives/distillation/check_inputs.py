"""What a check looks at, and what it says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dew.objectives.base import Mean, Step
from dew.objectives.distillation.objective import Distillation
from dew.typing import Batch, Variables


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check: what should be, what is, and whether that will do."""

    name: str
    expected: str
    found: str
    passed: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """An objective with variables and a batch, and its pooled loss over batches."""

    objective: Distillation
    variables: Variables
    batch: Batch

    def pooled(
        self, params: Any, variables: Variables, batches: Sequence[Batch]
    ) -> jax.Array:
        """The value of the statistics of all batches together.

        Variables are arguments: closed over, real weights would be compiled in.
        """
        step = Step(jnp.int32(0), jax.random.key(0))
        tree = {**variables, "params": params}
        stats = [self.objective.loss(tree, batch, step)[0] for batch in batches]
        # As the trainer has it: a plain number is a term of unit mass.
        means = [
            one if isinstance(one, Mean) else Mean(jnp.asarray(one), jnp.ones(()))
            for one in stats
        ]
        return self.objective.reduce_loss(sum(means[1:], means[0]))[0]

    def value(self, *batches: Batch) -> float:
        """The pooled loss."""
        return self.at(self.variables["params"], *batches)

    def at(self, params: Any, *batches: Batch) -> float:
        """The pooled loss at other parameters."""
        return float(self._value(params, self.variables, batches))

    @cached_property
    def _value(self) -> Callable[..., jax.Array]:
        return jax.jit(self.pooled)

    @cached_property
    def _with_slope(self) -> Callable[..., tuple[jax.Array, Any]]:
        return jax.jit(jax.value_and_grad(self.pooled))

    def with_slope(self, *batches: Batch) -> tuple[float, Any]:
        """The pooled loss and its gradient."""
        params = self.variables["params"]
        value, slope = self._with_slope(params, self.variables, batches)
        return float(value), slope
