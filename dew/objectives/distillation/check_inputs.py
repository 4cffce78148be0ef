"""The inputs of the self-checks, and the row that each of them reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dew.objectives.base import Mean, Step
from dew.objectives.distillation.objective import Distillation
from dew.typing import Batch, Variables


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one check: the expected value, the found one, and the verdict."""

    name: str
    expected: str
    found: str
    passed: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """An objective with variables and a batch, whose pooled loss is checked."""

    objective: Distillation
    variables: Variables
    batch: Batch

    def pooled(
        self, params: Any, variables: Variables, batches: Sequence[Batch]
    ) -> jax.Array:
        """Returns the loss of the pooled statistics of all batches.

        Variables are arguments: closed over, real weights would be compiled in.
        """
        step = Step(jnp.int32(0), jax.random.key(0))
        tree = {**variables, "params": params}
        stats = [self.objective.loss(tree, batch, step)[0] for batch in batches]
        # As in the trainer: a plain number is a term of unit mass.
        means = [
            one if isinstance(one, Mean) else Mean(jnp.asarray(one), jnp.ones(()))
            for one in stats
        ]
        return self.objective.reduce_loss(sum(means[1:], means[0]))[0]

    def value(self, *batches: Batch) -> float:
        """Returns the pooled loss at the subject's own parameters."""
        return self.at(self.variables["params"], *batches)

    def at(self, params: Any, *batches: Batch) -> float:
        """Returns the pooled loss at other parameters."""
        return float(self._value(params, self.variables, batches))

    @cached_property
    def _value(self) -> Callable[..., jax.Array]:
        return jax.jit(self.pooled)

    @cached_property
    def _with_slope(self) -> Callable[..., tuple[jax.Array, Any]]:
        return jax.jit(jax.value_and_grad(self.pooled))

    def with_slope(self, *batches: Batch) -> tuple[float, Any]:
        """Returns the pooled loss and its gradient by the parameters."""
        params = self.variables["params"]
        value, slope = self._with_slope(params, self.variables, batches)
        return float(value), slope


def counted(batch: Batch) -> np.ndarray:
    """Returns 1 for positions that predict a real token of their own document, else 0.

    Written as a loop in numpy, independent of the weights in `dew.objectives`.
    """
    rows, length = batch["tokens"].shape
    segments = np.asarray(batch.get("segment_ids", np.ones((rows, length), np.int32)))
    real = np.asarray(batch.get("mask", segments > 0), bool) & (segments > 0)
    asked = np.asarray(batch.get("loss_mask", real), bool)
    counted = np.zeros((rows, length))
    for i in range(length - 1):
        same = segments[:, i] == segments[:, i + 1]
        counted[:, i] = real[:, i] & real[:, i + 1] & same & asked[:, i + 1]
    return counted


def pad(batch: Batch, side: str, columns: int = 3) -> dict[str, Any]:
    """Returns the batch with masked columns of a token that is real elsewhere."""
    rows, length = batch["tokens"].shape
    complete = {
        "mask": jnp.ones((rows, length), bool),
        "positions": jnp.tile(jnp.arange(length, dtype=jnp.int32), (rows, 1)),
        **batch,
    }
    fills = {"tokens": 7 % int(jnp.max(batch["tokens"]) + 1)}
    width = (columns, 0) if side == "left" else (0, columns)
    return {
        name: jnp.pad(
            leaf,
            [(0, 0), width, *[(0, 0)] * (leaf.ndim - 2)],
            constant_values=fills.get(name, 0),
        )
        for name, leaf in complete.items()
    }


def uneven(batch: Batch) -> dict[str, Any]:
    """Returns the batch with fewer predicted tokens in each row than in the last."""
    rows, length = batch["tokens"].shape
    predicted = np.arange(length)[None] < np.linspace(length, 2, rows)[:, None]
    asked = batch.get("loss_mask", jnp.ones((rows, length), bool))
    return {**batch, "loss_mask": asked.astype(bool) & predicted}


def apart_and_packed(
    tokens: Int[Array, "batch seq"],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the same two texts as two rows, and packed into one row."""
    half = tokens.shape[1] // 2
    apart = tokens[:2, :half]
    place = jnp.arange(half, dtype=jnp.int32)
    separate = {
        "tokens": apart,
        "positions": jnp.stack([place, place]),
        "segment_ids": jnp.ones((2, half), jnp.int32),
    }
    together = {
        "tokens": apart.reshape(1, -1),
        "positions": jnp.concatenate([place, place])[None],
        "segment_ids": jnp.repeat(jnp.asarray([1, 2], jnp.int32), half)[None],
    }
    return separate, together
