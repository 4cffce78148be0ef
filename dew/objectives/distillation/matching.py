"""The terms over hidden states and attention: what they ask for, and sum to."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dew.losses.hidden_states import (
    AttentionMap,
    HiddenCosine,
    HiddenMSE,
    Relation,
    projector,
    visible_pairs,
)
from dew.losses.term import at
from dew.objectives.base import Mean, Step
from dew.objectives.tokens import real_tokens
from dew.typing import Batch

States = Sequence[Float[Array, "batch seq _"]]
Maps = Sequence[Float[Array, "batch _ seq seq"]]
Weighted = dict[str, tuple[Any, Array]]


@dataclass(frozen=True, kw_only=True)
class Matching:
    """All terms over what a model holds inside; each reads its own run of it."""

    hidden: tuple[HiddenMSE | HiddenCosine, ...] = ()
    relations: tuple[Relation, ...] = ()
    maps: tuple[AttentionMap, ...] = ()
    causal: bool = True

    @property
    def student_layers(self) -> tuple[int, ...]:
        """The student's layers, pair by pair."""
        return tuple(ours for term in self._of_states for ours, _ in term.pairs)

    @property
    def student_maps(self) -> tuple[int, ...]:
        """The student's layers whose attention is compared."""
        return tuple(ours for term in self.maps for ours, _ in term.pairs)

    def teacher_layers(self, teacher: int) -> tuple[int, ...]:
        """The layers that are asked of one teacher, pair by pair."""
        terms = [term for term in self._of_states if term.teacher == teacher]
        return tuple(theirs for term in terms for _, theirs in term.pairs)

    def teacher_maps(self, teacher: int) -> tuple[int, ...]:
        """The layers of one teacher whose attention is compared."""
        terms = [term for term in self.maps if term.teacher == teacher]
        return tuple(theirs for term in terms for _, theirs in term.pairs)

    def with_itself(self) -> "Matching | None":
        """The same terms between a student and itself; None where there are none."""
        if not (self._of_states or self.maps):
            return None

        def own(term: Any) -> Any:
            pairs = tuple((ours, ours) for ours, _ in term.pairs)
            return replace(term, pairs=pairs, teacher=0)

        return replace(
            self,
            hidden=tuple(map(own, self.hidden)),
            relations=tuple(map(own, self.relations)),
            maps=tuple(map(own, self.maps)),
        )

    def faults(self, teachers: int) -> list[str]:
        """Says which terms name a teacher that is not there."""
        return [
            f"{type(term).__name__} matches teacher {term.teacher}, and there are "
            f"{teachers}, counted from 0"
            for term in (*self._of_states, *self.maps)
            if not 0 <= term.teacher < teachers
        ]

    def projectors(
        self, key: Array, ours: Sequence[int], theirs: Mapping[int, Sequence[int]]
    ) -> dict[str, Array]:
        """A map for each pair of hidden states whose widths differ.

        `ours` are the widths of the student's states, `theirs` those of each teacher.
        """
        made = {}
        runs = self._runs(self.hidden)
        for i, (term, mine, other) in enumerate(runs):
            widths = zip(ours[mine], theirs[term.teacher][other], strict=True)
            for pair, (from_, to) in enumerate(widths):
                if from_ != to:
                    drawn = jax.random.fold_in(key, 1000 * i + pair)
                    made[f"{i}_{pair}"] = projector(drawn, from_, to)
        return made

    def sums(
        self,
        teacher: int,
        ours: tuple[States, Maps],
        theirs: tuple[States, Maps],
        projectors: Mapping[str, Array],
        batch: Batch,
        weights: Float[Array, "batch seq"],
        step: Step,
    ) -> Weighted:
        """Weight and unweighted sum of each term with this teacher, by name.

        States at positions that do not count are replaced before anything is computed.
        """
        found: dict[str, tuple[Any, Array]] = {}

        def add(name: str, term: Any, values: Array) -> None:
            found[name] = at(term.weight, step.step), Mean.of(values, weights).total

        real, visible = real_tokens(batch), self._visible(batch)
        for i, (term, mine, other) in enumerate(self._runs(self._of_states)):
            if term.teacher != teacher:
                continue
            place = i - len(self.hidden)
            live = weights > 0 if place < 0 else real
            sides = _kept(ours[0][mine], live), _kept(theirs[0][other], live)
            if place < 0:
                maps = [projectors.get(f"{i}_{pair}") for pair in range(len(sides[0]))]
                add(f"hidden_{i + 1}", term, term.values(*sides, maps))
            else:
                values = term.values(*sides, visible)
                add(f"relation_{place + 1}", term, values)
        for i, (term, mine, other) in enumerate(self._runs(self.maps)):
            if term.teacher == teacher:
                sides = term.read(ours[1][mine]), term.read(theirs[1][other])
                add(f"attention_{i + 1}", term, term.values(*sides, visible))
        return found

    @property
    def _of_states(self) -> tuple[Any, ...]:
        return (*self.hidden, *self.relations)

    def _runs(self, terms: Sequence[Any]) -> Iterator[tuple[Any, slice, slice]]:
        """Each term, and where its layers stand among the student's and its teacher's.

        `terms` begin as the list does that the layers were asked in.
        """
        start, starts = 0, dict.fromkeys((term.teacher for term in terms), 0)
        for term in terms:
            size, other = len(term.pairs), starts[term.teacher]
            yield term, slice(start, start + size), slice(other, other + size)
            start, starts[term.teacher] = start + size, other + size

    def _visible(self, batch: Batch) -> Bool[Array, "batch seq seq"]:
        segments = batch.get("segment_ids")
        return visible_pairs(real_tokens(batch), segments, causal=self.causal)


NOTHING = Matching()
"""No such terms."""


def _kept(states: States, live: Array) -> list[Array]:
    return [jnp.where(live[..., None], x, jnp.zeros((), x.dtype)) for x in states]
