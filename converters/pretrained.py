"""A model loaded from a folder: it runs, is trained further, and is saved again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from dew.converters.config.known_fields import KnownFields
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
    """A model with the folder it was loaded from, and the layout of its tensors there.

    Saving needs no more than this, whichever road the model was loaded by.
    """

    variables: Variables = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Folder
    """The folder that config, tokenizer, side files and weights are read from."""
    table: Table
    """The stored tensor behind each variable, and the layout of both."""
    road: Road = "native"
    """The road it was loaded by: native or lowered."""
    ties: Ties = field(default_factory=Ties)
    """How disagreements about tied weights were settled."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of config.json without effect: unknown, or named to be ignored."""
    known_fields: KnownFields | None = None
    """Fields that transformers knows; None for a model of a class of one's own."""

    @property
    def source(self) -> "Pretrained":
        """The model itself, so that it is saved like a task."""
        return self

    def plain(self, variables: Variables) -> tuple["Pretrained", Variables]:
        """Returns the model and variables that a folder for transformers can hold.

        Adapters are merged into the weights, and padding rows are cut off.
        """
        return self, variables

    @property
    def address(self) -> str:
        """The address as the user wrote it: a folder, a hub id or a URL."""
        return self.folder.address

    @property
    def content_hash(self) -> str:
        """The sha256 of the weights: equal for every sharding of the same tensors."""
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
        """Returns the logits at every position, as torch's forward pass does.

        Compiled once for each shape. Logits at padding positions are meaningless.

        Args:
            input_ids: token ids.
            attention_mask: true or 1 at real tokens; None where all are.
            position_ids: positions of the tokens; None counts from 0.

        Raises:
            ValueError: the model has no output head.
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
