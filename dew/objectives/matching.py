"""The terms over hidden states: which layers they ask for, and what they sum to."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dew.objectives.base import Mean, Step
from dew.objectives.features import (
    HiddenCosine,
    HiddenMSE,
    LayerPairs,
    Relation,
    visible_pairs,
)
from dew.objectives.hiding import real_tokens
from dew.objectives.terms import at
from dew.typing import Batch

States = Sequence[Float[Array, "batch seq _"]]


@dataclass(frozen=True, kw_only=True)
class Matching:
    """All terms over hidden states; each reads its own run of the states asked for."""

    hidden: tuple[HiddenMSE | HiddenCosine, ...] = ()
    relations: tuple[Relation, ...] = ()
    causal: bool = True

    @property
    def student_layers(self) -> tuple[int, ...]:
        """The student's layers, pair by pair."""
        return tuple(ours for ours, _ in self._pairs)

    @property
    def teacher_layers(self) -> tuple[int, ...]:
        """The teacher's layers, pair by pair."""
        return tuple(theirs for _, theirs in self._pairs)

    def unequal(
        self, ours: Sequence[int], theirs: Sequence[int]
    ) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Term, pair and widths of the hidden states that need a map between them."""
        place = 0
        for term, one in enumerate(self.hidden):
            for pair in range(len(one.pairs)):
                if ours[place] != theirs[place]:
                    yield term, pair, (ours[place], theirs[place])
                place += 1

    def sums(
        self,
        ours: States,
        theirs: States,
        projectors: Mapping[str, Array],
        batch: Batch,
        weights: Float[Array, "batch seq"],
        step: Step,
    ) -> dict[str, tuple[Any, Array]]:
        """Weight and unweighted sum of each term, by name.

        States at positions that do not count are replaced before anything is computed.
        """
        found = {}
        start = 0
        for i, term in enumerate(self.hidden):
            run = slice(start, start := start + len(term.pairs))
            maps = [projectors.get(f"{i}_{pair}") for pair in range(len(term.pairs))]
            live = weights > 0
            sides = (_kept(ours[run], live), _kept(theirs[run], live))
            values = term.values(*sides, maps)
            name = f"hidden_{i + 1}"
            found[name] = at(term.weight, step.step), Mean.of(values, weights).total
        visible = self._visible(batch)
        for i, relation in enumerate(self.relations):
            run = slice(start, start := start + len(relation.pairs))
            real = real_tokens(batch)
            sides = (_kept(ours[run], real), _kept(theirs[run], real))
            values = relation.values(*sides, visible)
            name = f"relation_{i + 1}"
            found[name] = at(relation.weight, step.step), Mean.of(values, weights).total
        return found

    @property
    def _pairs(self) -> LayerPairs:
        terms = (*self.hidden, *self.relations)
        return tuple(pair for term in terms for pair in term.pairs)

    def _visible(self, batch: Batch) -> Bool[Array, "batch seq seq"]:
        segments = batch.get("segment_ids")
        return visible_pairs(real_tokens(batch), segments, causal=self.causal)


def _kept(states: States, live: Array) -> list[Array]:
    return [jnp.where(live[..., None], x, jnp.zeros((), x.dtype)) for x in states]
