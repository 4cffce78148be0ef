"""Types shared by every package: trees, batches and the model protocol."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, no_type_check, runtime_checkable

from flax import struct
from jaxtyping import Array, Float

Variables: TypeAlias = Mapping[str, Any]
"""A flax variables dict: `params` plus any other collection the modules keep."""

Batch: TypeAlias = Mapping[str, Any]
"""One training example set: a tree of mappings, lists and tuples.

Arrays and numbers go to the devices, where a loss sees them. Other values, such as
texts, paths and records, stay on the host; `Objective.evaluate` and `preview` get them
with the rest. `dew.batch` divides the two.
"""

Position: TypeAlias = Mapping[str, Any]
"""Position of a data stream, as JSON values: what `get_state` and `set_state` pass."""

Path: TypeAlias = tuple[str, ...]
"""The dict keys above a leaf, from the root down.

An entry of a tuple or a list stands there by its index (`"0"`), a field of a record by
its name.
"""

PathFilter: TypeAlias = Callable[[Path], bool]
"""A predicate on the path of a leaf, which selects leaves of a tree."""


@no_type_check
@struct.dataclass
class Outputs:
    """Outputs of a forward pass; a field that was not requested is None.

    `logits` are the scores before any loss, `final` the hidden states after the final
    norm, `hidden` the block outputs in the order of `layers`, and `pooled` one vector
    for each text, of encoders that have a pooler.
    """

    logits: Float[Array, "batch seq vocab"] | None = None
    final: Float[Array, "batch seq embed"] | None = None
    hidden: tuple[Float[Array, "batch seq embed"], ...] = ()
    pooled: Float[Array, "batch embed"] | None = None


@runtime_checkable
class Model(Protocol):
    """A network as pure functions of its variables: all that objectives rely on.

    `inputs` maps names to arrays: `tokens` [batch, seq] int32 and, where given,
    `positions`, `segment_ids` (0 marks padding) and `mask` (true marks a real token),
    all [batch, seq]; other modalities have torch's names. `layers` selects hidden
    states: `i` is the output of block `i` before any final norm, negative numbers count
    from the last block, and the number of blocks means `final`. `rngs` and `mutable`
    follow flax: with `mutable` the result is a pair of outputs and updated collections.

    `method="hidden"` takes the same inputs and returns `final` alone;
    `method="unembed"` takes `final` and returns logits.
    """

    def apply(
        self,
        variables: Variables,
        inputs: Any,
        *,
        train: bool = False,
        layers: Sequence[int] = (),
        rngs: dict[str, Array] | None = None,
        mutable: bool | list[str] = False,
        method: str | None = None,
    ) -> Any:
        """Evaluates the model, or the part of it that `method` names."""
        ...
