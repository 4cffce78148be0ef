"""Putting a trained model to its plain use: inputs in, outputs out."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from dew.source import Source
from dew.typing import Model, Outputs, Variables


@dataclass(frozen=True, eq=False)
class Scoring:
    """A model that scores inputs: classes, masked tokens, embeddings."""

    source: Source
    variables: Variables

    def score(self, inputs: Mapping[str, Any]) -> Outputs:
        """The model's outputs for one batch of named inputs, dropout off."""
        return _score(self.source.model, self.variables, dict(inputs))


@partial(jax.jit, static_argnums=0)
def _score(model: Model, variables: Variables, inputs: Mapping[str, Any]) -> Outputs:
    return model.apply(variables, inputs)
