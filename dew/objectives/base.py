"""What the trainer is optimizing.

The trainer owns how a run proceeds: mesh, compiled step, accumulation, EMA, checkpoints
and logs. An `Objective` owns what is learned: the variables it starts from, the loss of
a batch, and what an evaluation yields. Swap the objective, and no mechanics change.

A loss is given as additive statistics, so that microbatches, devices and records of
unequal weight add up to exactly what one large batch would give.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import (
    Any,
    Generic,
    Protocol,
    TypeAlias,
    no_type_check,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key
from typing_extensions import TypeVar

from dew.nn.block import DecoderBank
from dew.state import TrainState
from dew.tasks.base import Task as Task
from dew.tree import FROZEN as FROZEN
from dew.tree import everything as everything
from dew.tree import freeze as freeze
from dew.tree import merge as merge
from dew.tree import select as select
from dew.tree import thaw as thaw
from dew.tree import under as under
from dew.tree import widen
from dew.typing import Batch as Batch
from dew.typing import Path as Path
from dew.typing import PathFilter as PathFilter
from dew.typing import Variables as Variables

Initializer: TypeAlias = jax.tree_util.Partial
"""An objective's `init` as one value a JIT can take.

Its bound arguments are pytree children, so held variables reach a JIT as arguments and
are not compiled in as constants.
"""

InputSpec: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]
"""Shape and dtype of each input of one example, without the batch axis."""

Artifacts: TypeAlias = Any
"""What an evaluation yields for one batch; `Objective.artifact` is its type."""


@no_type_check
@struct.dataclass
class Mean:
    """A sum and the mass it is averaged over; two of them add leaf by leaf.

    The mass is not negative and does not depend on the parameters. Zero mass declares a
    zero sum and no contribution.

    >>> losses, weights = jnp.asarray([3.0, 5.0, 7.0]), jnp.asarray([1.0, 1.0, 0.0])
    >>> pooled = Mean.of(losses, weights) + Mean.of(losses, 2 * weights)
    >>> float(pooled.total), float(pooled.mass)
    (24.0, 6.0)
    """

    total: Float[Array, ""]
    mass: Float[Array, ""]

    def __add__(self, other: "Mean") -> "Mean":
        """The statistics of both sets of records together, in float32 or wider."""
        total, mass = (widen(leaf) for leaf in (self.total, self.mass))
        return Mean(total + widen(other.total), mass + widen(other.mass))

    @classmethod
    def of(cls, values: Float[Array, "..."], weights: Float[Array, "..."]) -> "Mean":
        """The weighted sum of `values` over the sum of `weights`, float32 or wider.

        Values of zero weight are replaced before the product, so that one which is not
        finite affects neither the sum nor its gradient.
        """
        values = widen(values)
        weights = jax.lax.stop_gradient(weights).astype(values.dtype)
        values = jnp.where(weights > 0, values, 0)
        return cls(jnp.sum(values * weights), jnp.sum(weights))


def mean_loss(stats: Mean) -> tuple[jax.Array, jax.Array]:
    """Returns total / mass, and whether there was any mass.

    Without mass the value is 0, its gradient is 0, and neither is NaN. No gradient
    flows through the mass. Float32 or wider.

    >>> value, active = mean_loss(Mean(jnp.float32(6), jnp.float32(4)))
    >>> float(value), bool(active)
    (1.5, True)
    >>> value, active = mean_loss(Mean(jnp.float32(0), jnp.float32(0)))
    >>> float(value), bool(active)
    (0.0, False)
    """
    total = widen(stats.total)
    mass = jax.lax.stop_gradient(jnp.asarray(stats.mass)).astype(total.dtype)
    active = mass > 0
    value = jnp.where(active, total, 0) / jnp.where(active, mass, 1)
    return value, active


Loss = TypeVar("Loss", default=Mean | jax.Array | float)
Effects = TypeVar("Effects", default=None)
S = TypeVar("S")


@no_type_check
@struct.dataclass
class Step:
    """The trainer's clock, random key and averaged weights for one microbatch.

    `step` is the number of accepted microbatches, which an objective's own schedules
    read. `key` is drawn anew for every attempt; a replayed microbatch gets the key of
    its first evaluation. `ema` is the variables tree with the averaged leaves in place,
    or None without EMA.
    """

    step: Int[Array, ""]
    key: Key[Array, ""]
    ema: Variables | None = None


@no_type_check
@struct.dataclass
class Aux(Generic[Effects]):
    """Reports that a loss returns beside its statistics, by position or keyword.

    `metrics` are scalars, or `Mean`s which pool over an accumulation, for the tracker.
    `variables` replace whole collections other than `params`, BatchNorm's averages for
    example. `qk_stats` is the collection that attention layers sowed, nested by module
    path: `max_logits` holds a one-tuple of float32 [rows, heads], the largest score of
    each head (an MLA layer adds `qk_nope`). `effects` are additive observations that
    are applied once a commit, through `Objective.apply_effects`.
    """

    metrics: Mapping[str, Any] = struct.field(default_factory=dict)
    variables: Variables | None = None
    qk_stats: Variables | None = None
    effects: Effects | None = None


@no_type_check
@struct.dataclass
class Prediction:
    """The scores behind a token objective's loss, for comparison with a teacher.

    `logits` are the float32 scores of the forward pass, `losses` and `weights` the loss
    of each position and its weight in the objective's sum, `hidden` the states of the
    requested layers, in their order.
    """

    logits: Float[Array, "batch seq vocab"]
    losses: Float[Array, "batch seq"]
    weights: Float[Array, "batch seq"]
    hidden: tuple[Float[Array, "batch seq embed"], ...] = ()


@dataclass(frozen=True)
class EMASpec:
    """Which leaves an exponential moving average follows, and how closely.

    After commit number n (from 0) an averaged leaf becomes
    decay(n) · average + (1 - decay(n)) · live, computed in float32 or wider. The
    average is stored in `dtype`; None means float32, or the leaf's own dtype if that is
    wider, so that an average of bfloat16 weights moves. Whoever reads the averaged
    variables gets them in the dtypes of the live ones.

    >>> spec = EMASpec(optax.constant_schedule(0.99), under("params"))
    >>> spec.decay(0), spec.select(("batch_stats", "mean"))
    (0.99, False)
    """

    decay: optax.Schedule
    select: PathFilter = everything
    dtype: DTypeLike | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.dtype is not None and not jnp.issubdtype(self.dtype, jnp.floating):
            raise ValueError(
                "EMASpec.dtype must be None or a floating dtype, got "
                f"{jnp.dtype(self.dtype).name}"
            )


AVERAGE = "average"
"""The `Objective.reference` of a loss whose frozen weights are those of `Step.ema`."""


class _Computed:
    """A member with a computed default, which a subclass may also just set.

    It has no `__set__`: what `__init__` or a dataclass sets on an instance comes first.
    """

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self._compute = compute

    def __get__(self, objective: Any, owner: type) -> Any:
        if objective is None:
            # A dataclass takes what it finds on the class for its field's default.
            raise AttributeError("an instance of the objective has this member")
        return self._compute(objective)


def _no_inputs(objective: "AnyObjective") -> InputSpec:
    name = type(objective).__name__
    raise TypeError(
        f"{name} lacks inputs, the shapes and dtypes of one example: set self.inputs "
        "in __init__, or make it a field or a property"
    )


def _bound_init(objective: "AnyObjective") -> Initializer:
    return Initializer(objective.init, variables=objective.held_variables())


class Objective(ABC, Generic[Loss, Effects]):
    """What is being learned: the variables, the loss, and what an evaluation yields.

    A subclass gives any attribute as one that `__init__` sets, a dataclass field, or a
    property.
    """

    # `| Any` lets type checkers accept a property, too, where an attribute is declared.
    artifact: type | Any | None = None
    """The type that `evaluate` returns, None when it returns nothing."""

    ema: EMASpec | Any | None = None
    """The average that a run keeps of the variables, None for none."""

    held: tuple[str, ...] | Any = (FROZEN,)
    """Collections that a run holds and never updates; what `held_variables` supplies of
    them is not written into checkpoints."""

    reference: str | Any | None = None
    """Where the loss reads frozen weights that it compares the trained ones with.

    A collection's name, or `AVERAGE` where those are the average's, which then never
    moves. `published`, and so `pipeline`, leaves them out.
    """

    inputs: InputSpec | Any = _Computed(_no_inputs)
    """Shapes and dtypes of one example, from which variables are drawn."""

    bank_sites: tuple[DecoderBank, ...] | Any = ()
    """The scanned stacks that this objective evaluates; usually none.

    Each names the path of a decoder below every collection, and the view between its
    canonical layers and the stacked bank. Variables and optimizer trees stay canonical.
    They are declared, for whoever takes a snapshot of the execution: that stacks are
    scanned is the model's choice (`scan`, `--stack`), which stacks by the same view in
    every compiled step.
    """

    initializer: Initializer | Any = _Computed(_bound_init)
    """`init` with the held variables bound as arguments of the JIT that takes it.

    As a closure's constants, a loaded checkpoint would be compiled into the executable.
    """

    def held_variables(self) -> Variables | None:
        """The arrays that this objective starts from, None when it draws them all.

        Read once by the trainer, which passes them back to `init`.
        """
        return None

    @abstractmethod
    def init(self, key: jax.Array, variables: Variables | None = None) -> Variables:
        """Returns the whole variables tree from one key; pure.

        `variables` is the held tree, as the trainer passes it in; None means the
        objective's own `held_variables()`.
        """

    @abstractmethod
    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Loss, Aux[Effects]]:
        """Returns the additive statistics of one batch, and the reports beside them.

        `params` is the whole variables tree. A `Mean` shares one mass over records; a
        scalar is one term of unit mass; any other PyTree is the objective's own, its
        leaves are added over microbatches, and `reduce_loss` makes the value.
        """

    def reduce_loss(self, stats: Loss) -> tuple[jax.Array, jax.Array]:
        """Returns the value of pooled statistics, and whether they have support.

        Raises:
            ValueError: the statistics are neither a `Mean` nor one real number.
        """
        if isinstance(stats, Mean):
            return mean_loss(stats)
        return _scalar(stats, self), jnp.asarray(True)

    def apply_effects(self, variables: Variables, effects: Effects) -> Variables:
        """Returns the collections that a window's summed effects replace.

        Raises:
            TypeError: this objective returns effects but does not define how they
                apply.
        """
        raise TypeError(f"{type(self).__name__} lacks apply_effects for its effects")

    def predict(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
    ) -> tuple[Mean, Aux[Effects], Prediction]:
        """Returns the statistics of `loss`, with the prediction behind them.

        The statistics are one `Mean` over the positions that the weights count. `train`
        enables dropout as `loss` does; a frozen teacher scores without it.

        Raises:
            TypeError: this objective scores no token logits.
        """
        raise TypeError(f"{type(self).__name__} lacks predict: it scores no tokens")

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> Artifacts | None:
        """Returns scores for every row of the global batch, None where there are none.

        Called outside the training step, on every process; draws no samples.
        """
        return None

    def pipeline(self, state: TrainState, *, ema: bool = True) -> Task:
        """Returns the trained model as its inference task, over `published` weights.

        Raises:
            TypeError: this objective has no inference task.
            ValueError: `ema` is true for a run that keeps no average.
        """
        raise TypeError(f"{type(self).__name__} lacks pipeline: it has no task")

    def published(self, state: TrainState, *, ema: bool) -> Variables:
        """Returns the trained variables of a state, never those of `reference`.

        `ema=True` takes `state.averaged`, False the live weights. Where the average is
        the loss's reference, both take the live weights.

        Raises:
            ValueError: `ema` is true for a run that keeps no average.
        """
        if self.reference == AVERAGE:
            return state.variables
        trained = state.inference_variables(ema=ema)
        return {name: tree for name, tree in trained.items() if name != self.reference}

    def preview(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        scored: Artifacts | None = None,
    ) -> Artifacts | None:
        """Returns what to display of one batch: `scored`, or else an evaluation."""
        return scored if scored is not None else self.evaluate(params, batch, step)


def _scalar(value: Any, objective: Objective[Any, Any]) -> jax.Array:
    """The value as a float32 or wider scalar."""
    name = type(objective).__name__
    if jax.tree.structure(value) != jax.tree.structure(0):
        raise ValueError(
            f"{name}.loss must return a Mean or a scalar, or {name} must define "
            f"reduce_loss; got {type(value).__name__}"
        )
    array = jnp.asarray(value)
    if array.shape or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise ValueError(
            f"{name}.loss must return one real number or a Mean, got {array.dtype} of "
            f"shape {array.shape}"
        )
    return widen(array)


AnyObjective: TypeAlias = Objective[Any, Any]
"""An objective of any statistics and effects, as the training machinery takes it."""


def scalar_loss(
    objective: Objective[Loss, Effects],
    variables: Variables,
    batch: Batch,
    step: Step,
) -> tuple[jax.Array, Aux[Effects]]:
    """Evaluates and reduces the loss in one call, for direct differentiation.

    >>> from dew.nn.config import MLP, Attention, DecoderConfig
    >>> from dew.nn.decoder import Decoder
    >>> from dew.objectives import CausalLM
    >>> from dew.source import Source
    >>> attention = Attention(heads=2, kv_heads=1, head_dim=4)
    >>> config = DecoderConfig(
    ...     vocab=11, embed=8, layers=1, attention=attention, mlp=MLP(dim=6)
    ... )
    >>> objective = CausalLM(source=Source(model=Decoder(config)), seq_len=6)
    >>> variables = objective.init(jax.random.key(0))
    >>> batch = {"tokens": jnp.arange(12).reshape(2, 6) % 11}
    >>> step = Step(jnp.int32(0), jax.random.key(1))
    >>> loss, aux = scalar_loss(objective, variables, batch, step)
    >>> loss.shape, loss.dtype.name
    ((), 'float32')
    """
    stats, aux = objective.loss(variables, batch, step)
    return objective.reduce_loss(stats)[0], aux


@runtime_checkable
class Metric(Protocol[S]):
    """Reduces a validation pass to one number, on the host.

    `reads` is the type of artifact of which a call makes a contribution. The first
    contribution starts a pass; `merge` may update the accumulator in place. Metrics
    keep no state between passes and communicate with no other process.
    """

    reads: type

    def __call__(self, artifact: Any, /) -> S:
        """The contribution of one batch's artifact to the pass."""
        ...

    def merge(self, accumulated: S, contribution: S, /) -> S:
        """The accumulator with one more contribution merged in."""
        ...

    def finalize(self, accumulated: S, /) -> float:
        """The value of the finished pass."""
        ...


def merge_totals(
    accumulated: tuple[float, float], contribution: tuple[float, float]
) -> tuple[float, float]:
    """Adds one batch's (total, count) into a metric's accumulator.

    A statistic that is a sum over a count merges so, whatever the sizes of batches.

    >>> accumulated = merge_totals((6.0, 4.0), (3.0, 2.0))
    >>> accumulated, mean_of_totals(accumulated)
    ((9.0, 6.0), 1.5)
    """
    return accumulated[0] + contribution[0], accumulated[1] + contribution[1]


def mean_of_totals(accumulated: tuple[float, float]) -> float:
    """Divides a metric's total by its count.

    >>> mean_of_totals((9.0, 6.0))
    1.5

    Raises:
        ValueError: the count is zero, so the pass held nothing to average.
    """
    total, count = accumulated
    if count == 0:
        raise ValueError(
            "the validation pass was empty: a total of "
            f"{total} over a count of 0 has no mean"
        )
    return total / count
