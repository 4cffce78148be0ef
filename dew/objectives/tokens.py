"""What the layers of a model attend to, where it can be seen."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from dew.objectives.base import Objective, Prediction, Step
from dew.typing import Batch, Variables


@runtime_checkable
class Attentive(Protocol):
    """A token objective whose model can leave what its layers attend to."""

    def read(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
        opened: tuple[str, ...] = (),
    ) -> tuple[Prediction, Variables]:
        """One pass, and what the layers sow into the `opened` collections."""
        ...


def with_maps(
    objective: Objective[Any, Any],
    variables: Variables,
    batch: Batch,
    step: Step,
    *,
    train: bool,
    layers: Sequence[int],
    maps: Sequence[int],
) -> tuple[Prediction, tuple[Float[Array, "batch _ seq seq"], ...]]:
    """One pass with the attention scores of some blocks, [batch, heads, queries, keys].

    Raises:
        ValueError: the model keeps no scores, as a lowered one whose kernels are fused.
    """
    if not isinstance(objective, Attentive):
        raise ValueError(
            f"{type(objective).__name__} shows no attention scores; match hidden "
            "states or their relations instead"
        )
    prediction, sown = objective.read(
        variables, batch, step, train=train, layers=layers, opened=(MAPS,)
    )
    blocks = sown[MAPS]["layers"]
    count = len(blocks)
    faults = [i for i in maps if not -count <= i < count]
    if faults:
        raise ValueError(f"attention is asked of blocks {faults}; there are {count}")
    found = tuple(blocks[str(i % count)]["attn"]["scores"][0] for i in maps)
    return prediction, found


MAPS = "maps"
"""The collection that a native model leaves its attention scores in."""
