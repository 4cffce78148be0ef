"""One forward pass of a trained model as an inference task."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import jax
from jax.typing import ArrayLike

from dew.source import Source
from dew.typing import Model, Outputs, Variables

Inputs: TypeAlias = Mapping[str, ArrayLike]
"""Arrays that a model is applied to, by name, each with a leading batch axis."""


@dataclass(frozen=True, eq=False)
class Scoring:
    """A model that scores inputs: classes, masked tokens, embeddings."""

    source: Source
    variables: Variables

    def score(self, inputs: Inputs) -> Outputs:
        """The model's outputs for one batch of named inputs, dropout off."""
        return _score(self.source.model, self.variables, dict(inputs))


@partial(jax.jit, static_argnums=0)
def _score(model: Model, variables: Variables, inputs: Inputs) -> Outputs:
    return model.apply(variables, inputs)
