"""The state of a training run between two steps."""

from typing import Any, no_type_check

from flax import struct
from jaxtyping import Array, Int, Key

from dew.tree import flatten, map_leaves, merge
from dew.typing import Path, Variables


@no_type_check
@struct.dataclass
class Replay:
    """The inputs that evaluate the microbatches of an open window once more.

    Every leaf has a leading axis of one entry per microbatch: the batches, the keys
    that they were first evaluated with, and the collections beside `params` as they
    were on entry.
    """

    batches: Any
    keys: Key[Array, " window"]
    steps: Int[Array, " window"]
    collections: Any


@no_type_check
@struct.dataclass
class Window:
    """Sums over the microbatches accepted since the last commit.

    `gradient` is the sum of the numerators' gradients where statistics are a `Mean` or
    a scalar; composite statistics fill `replay` instead.
    """

    count: Int[Array, ""]
    stats: Any
    metrics: Any
    gradient: Any
    effects: Any
    qk_stats: Any
    replay: Replay | None


@no_type_check
@struct.dataclass
class TrainState:
    """All of a run but its data: three clocks, variables, optimizer, EMA, root key.

    `attempts` counts microbatches evaluated and drives random keys; `accepted` counts
    those that were finite and drives the objective's schedules; `commits` counts
    optimizer updates and drives the optimizer, its schedules and the EMA. `rejected`
    microbatches and `dropped` windows, those that were not finite, are counted since
    the last accepted or committed one.
    """

    attempts: Int[Array, ""]
    accepted: Int[Array, ""]
    commits: Int[Array, ""]
    rejected: Int[Array, ""]
    dropped: Int[Array, ""]
    key: Key[Array, ""]
    variables: Any
    optimizer: Any
    ema: Any
    window: Window | None

    @property
    def averaged(self) -> Variables | None:
        """The variables with the EMA's leaves in place, or None without an EMA."""
        return None if self.ema is None else with_average(self.variables, self.ema)

    def inference_variables(self, *, ema: bool) -> Variables:
        """The variables of an inference task: the averaged ones, or the live ones.

        Raises:
            ValueError: `ema` is true for a run that keeps no EMA.
        """
        if not ema:
            return self.variables
        if self.averaged is None:
            raise ValueError(
                "ema=True asks for averaged weights, but this run keeps no EMA; give "
                "ema=False for the live ones, or the objective an EMASpec"
            )
        return self.averaged


def with_average(variables: Variables, ema: Variables) -> Variables:
    """Returns the variables with averaged leaves in place, in the dtypes of the live.

    An average may be stored in a wider dtype than its leaf, so that it moves.
    """
    live = flatten(variables)

    def in_live_dtype(path: Path, leaf: Any) -> Any:
        dtype = live[path].dtype if path in live else leaf.dtype
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)

    return merge(variables, map_leaves(in_live_dtype, ema))
