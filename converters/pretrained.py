"""A model as a folder holds it: ready to run, to train further and to write again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from dew.converters.folder.folder import Folder
from dew.converters.mapping.table import Table
from dew.converters.tied_weights import Ties
from dew.source import Source
from dew.typing import Variables

Road = Literal["auto", "native", "lowered"]
"""Ways into JAX: dew's own modules, or transformers' through torch.export.

"auto" is a request only: the native road where it has the architecture.
"""


@dataclass(frozen=True, kw_only=True)
class Pretrained(Source):
    """A source that knows the folder it came from and how its tensors lie there.

    `config` is config.json as the folder has it. `table` pairs variables with stored
    tensors, whichever road they came by, so that saving never asks.
    """

    variables: Variables = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Folder
    table: Table
    road: Road = "native"
    ties: Ties = field(default_factory=Ties)

    @property
    def source(self) -> "Pretrained":
        """Itself: what is saved has a source and variables, as a task has."""
        return self

    def plain(self, variables: Variables) -> tuple["Pretrained", Variables]:
        """What a folder for transformers holds of trained variables, and its source.

        What stands beside a model, such as an adapter, is no part of it.
        """
        return self, variables

    @property
    def address(self) -> str:
        """What the user called the model: a folder, a hub id, a URL."""
        return self.folder.address

    @property
    def content_hash(self) -> str:
        """sha256 of the weights: the same for every sharding of the same tensors."""
        return self.folder.weights.content_hash

    @cached_property
    def _forward(self) -> Callable[..., Any]:
        def forward(variables: Any, inputs: Mapping[str, Any]) -> Any:
            return self.model.apply(variables, inputs).logits

        return jax.jit(forward)

    def logits(
        self,
        input_ids: Int[np.ndarray, "batch seq"],
        attention_mask: Int[np.ndarray, "batch seq"]
        | Bool[np.ndarray, "batch seq"]
        | None = None,
        position_ids: Int[np.ndarray, "batch seq"] | None = None,
    ) -> Float[np.ndarray, "batch seq vocab"]:
        """Scores of tokens at every position, as torch's forward gives them.

        Compiled once for each shape. Rows of padding hold numbers that mean nothing.

        Raises:
            ValueError: the model has no head, and so no scores.
        """
        inputs = {"tokens": np.asarray(input_ids, np.int32)}
        if attention_mask is not None:
            inputs["mask"] = np.asarray(attention_mask, bool)
        if position_ids is not None:
            inputs["positions"] = np.asarray(position_ids, np.int32)
        logits = self._forward(self.variables, inputs)
        if logits is None:
            raise ValueError(
                f"{self.address} has no head that scores anything; model.apply gives "
                "its states"
            )
        return np.asarray(logits)
