"""The terms over hidden states and attention: the layers they need, and their sums."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dew.losses.hidden_states import (
    StateTerm,
    projector,
    visible_pairs,
)
from dew.losses.term import Reads, StateInputs, at
from dew.objectives.base import Mean, Step
from dew.objectives.distillation.scoring import Scored
from dew.objectives.tokens import real_tokens
from dew.typing import Batch

Weighted: TypeAlias = dict[str, tuple[float | Array, Array]]
"""By metric name, the weight of a term and its sum before that weight."""


@dataclass(frozen=True, kw_only=True)
class Matching:
    """The terms of a distillation over paired layers of the student and its teachers.

    `causal` restricts relations and attention to keys that are not later than the
    query.
    """

    terms: tuple[StateTerm, ...] = ()
    causal: bool = True

    def student_layers(self, reads: Reads) -> tuple[int, ...]:
        """Returns the student's layers whose states or attention are compared."""
        return _layers(t.pairs for t in self.terms if t.reads == reads)

    def teacher_layers(self, reads: Reads, teacher: int) -> tuple[int, ...]:
        """Returns the layers of one teacher whose states or attention are compared."""
        pairs = (
            tuple((theirs, ours) for ours, theirs in t.pairs)
            for t in self.terms
            if t.reads == reads and t.teacher == teacher
        )
        return _layers(pairs)

    def faults(self, teachers: int) -> list[str]:
        """Returns a message for each term that names a teacher which does not exist."""
        return [
            f"{type(term).__name__} matches teacher {term.teacher}, and there are "
            f"{teachers}, counted from 0"
            for term in self.terms
            if not 0 <= term.teacher < teachers
        ]

    @property
    def projecting(self) -> tuple[StateTerm, ...]:
        """The terms whose states get projectors; their places name the projectors."""
        return tuple(term for term in self.terms if term.projects)

    def projectors(
        self,
        key: Array,
        student: Mapping[int, int],
        teachers: Mapping[int, Mapping[int, int]],
    ) -> dict[str, Array]:
        """Draws a projector for each pair of hidden states whose widths differ.

        Args:
            key: what the projectors are drawn with.
            student: the width of each of the student's layers.
            teachers: by the number of a teacher, the width of each of its layers.

        Returns:
            The projectors by the names "TERM_PAIR", both counted from 0, where TERM
            counts the terms that project.
        """
        matrices = {}
        for i, term in enumerate(self.projecting):
            for pair, (ours, theirs) in enumerate(term.pairs):
                widths = student[ours], teachers[term.teacher][theirs]
                if widths[0] != widths[1]:
                    drawn = jax.random.fold_in(key, 1000 * i + pair)
                    matrices[f"{i}_{pair}"] = projector(drawn, *widths)
        return matrices

    def sums(
        self,
        number: int,
        *,
        student: Scored,
        teacher: Scored,
        projectors: Mapping[str, Array],
        batch: Batch,
        step: Step,
    ) -> Weighted:
        """Returns weight and unweighted sum of each term with one teacher, by name.

        `number` is the teacher's. States at positions that do not count are replaced by
        zeros before anything is computed.
        """
        sums: Weighted = {}
        if not any(term.teacher == number for term in self.terms):
            return sums
        real = real_tokens(batch)
        places: dict[str, int] = {}
        for term in self.terms:
            place = places[term.metric] = places.get(term.metric, -1) + 1
            if term.teacher != number:
                continue
            ours, theirs = self._sides(term, number, student, teacher)
            if term.reads == "hidden":
                # A relation reads whole rows, so every real token counts in it, even
                # one whose own prediction has no weight.
                live = real if term.whole_sequence else student.weights > 0
                ours, theirs = _masked(ours, live), _masked(theirs, live)
            matrices = [projectors.get(f"{place}_{i}") for i in range(len(ours))]
            inputs = StateInputs(
                term.compared(ours),
                term.compared(theirs),
                visible=self._visible(batch, real) if term.whole_sequence else None,
                projectors=matrices if term.projects else (),
            )
            total = Mean.of(term.values(inputs), student.weights).total
            name = f"{term.metric}_{place + 1}"
            sums[name] = at(term.weight, step.step), total
        return sums

    def _sides(
        self, term: StateTerm, number: int, student: Scored, teacher: Scored
    ) -> tuple[list[Array], list[Array]]:
        """Returns the layers of both sides that the term pairs."""
        reads = term.reads
        attribute = "maps" if reads == "attention" else "hidden"
        by_layer = [
            dict(zip(layers, getattr(side, attribute), strict=True))
            for layers, side in (
                (self.student_layers(reads), student),
                (self.teacher_layers(reads, number), teacher),
            )
        ]
        return (
            [by_layer[0][ours] for ours, _ in term.pairs],
            [by_layer[1][theirs] for _, theirs in term.pairs],
        )

    def _visible(
        self, batch: Batch, real: Bool[Array, "batch seq"]
    ) -> Bool[Array, "batch seq seq"]:
        return visible_pairs(real, batch.get("segment_ids"), causal=self.causal)


def _layers(runs: Iterable[tuple[tuple[int, int], ...]]) -> tuple[int, ...]:
    """Returns the distinct first layers of all pairs, in the order of the terms."""
    return tuple(dict.fromkeys(first for pairs in runs for first, _ in pairs))


def _masked(
    states: list[Float[Array, "batch seq _"]], live: Bool[Array, "batch seq"]
) -> list[Float[Array, "batch seq _"]]:
    return [jnp.where(live[..., None], x, jnp.zeros((), x.dtype)) for x in states]
