"""Distillation: a student learns what a teacher says of every token.

    objective = Distillation(
        student=CausalLM(source=small, seq_len=1024),
        teacher=CausalLM(source=large, seq_len=1024),
        terms=(ForwardKL(temperature=2.0), CrossEntropy(weight=0.5)),
    )

The loss is the weighted sum of all terms over the student's own mass, one `Mean`: so
accumulation, masks, packing and devices cannot change it, and no replay is needed.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dew.nn.stack import DecoderBank
from dew.objectives.base import (
    Artifacts,
    Aux,
    EMASpec,
    InputSpec,
    Mean,
    Objective,
    Step,
    Task,
)
from dew.objectives.chunking import Whole, sequence_weights, term_sums
from dew.objectives.divergences import CrossEntropy, ForwardKL
from dew.objectives.features import HiddenCosine, HiddenMSE, Relation, projector
from dew.objectives.language import Splittable, TokenScores
from dew.objectives.matching import Matching
from dew.objectives.measures import Watched
from dew.objectives.policy import PolicyGradient
from dew.objectives.scores import Dense
from dew.objectives.teachers import Scored, Teacher, as_teacher
from dew.objectives.terms import Term, at, names
from dew.objectives.uld import ULD
from dew.objectives.unembedding import deferred
from dew.state import TrainState
from dew.tree import FROZEN, flatten, unflatten
from dew.typing import Batch, Path, Variables

TEACHER = "teacher"
"""The collection that teachers' variables are held in, each under its number."""

PROJECTORS = "projectors"
"""Where below `params` the maps between widths train; no export holds them."""

WHOLE_BYTES = 2**28
"""Student logits above this size are chunked by `auto`, into pieces a quarter of it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Distillation(Objective[Mean, Any]):
    """Terms between a student and its teachers, over the student's own positions.

    Teachers are held in the collection `teacher`: they get no gradient, no optimizer
    state, no place in a checkpoint (their hash has) and none in an export. Leaves that
    a teacher shares with what the student has frozen are kept once, as for the base
    model of an adapter. Terms that are the student's alone (`CrossEntropy`) count once
    whatever the teachers' weights are; `hidden` and `relations` are matched with the
    first teacher, in terms of projectors that train below `params/projectors`.

    `per` averages over tokens, or over sequences of any length. `chunk` takes so many
    positions at a time, so that neither side's logits are ever whole; `auto` does that
    where they would be large. `measures` None watches all that the first teacher can
    be watched by; () watches nothing and saves their time.
    """

    student: Objective[Any, Any]
    teacher: Objective[Any, Any] | Teacher
    others: tuple[Teacher, ...] = ()
    terms: tuple[Term, ...] = (ForwardKL(),)
    hidden: tuple[HiddenMSE | HiddenCosine, ...] = ()
    relations: tuple[Relation, ...] = ()
    measures: tuple[Term, ...] | None = None
    per: Literal["token", "sequence"] = "token"
    chunk: int | Literal["auto"] | None = "auto"
    causal: bool = True
    ema: EMASpec | None = None

    artifact: ClassVar[type | None] = TokenScores
    held: ClassVar[tuple[str, ...]] = (FROZEN, TEACHER)

    def __post_init__(self) -> None:
        if not (self.terms or self.hidden or self.relations):
            raise ValueError("Distillation needs at least one term, got none")
        if isinstance(self.chunk, int) and not self._splits:
            raise ValueError(
                f"chunk={self.chunk} needs a student and teachers that give final "
                "states and their unembedding apart; use chunk=None"
            )
        if self.ema is None:
            object.__setattr__(self, "ema", self.student.ema)

    @property
    def inputs(self) -> InputSpec:
        """The student's."""
        return self.student.inputs

    @property
    def bank_sites(self) -> tuple[DecoderBank, ...]:
        """The student's."""
        return self.student.bank_sites

    @cached_property
    def teachers(self) -> tuple[Teacher, ...]:
        """All of them; the first is the one that is measured."""
        return (as_teacher(self.teacher), *self.others)

    @cached_property
    def watched(self) -> tuple[Term, ...]:
        """The measures, without those that are terms at weight 1 anyway."""
        if self.measures is not None:
            return self.measures
        return (*self.teachers[0].measures, CrossEntropy())

    @cached_property
    def matching(self) -> Matching:
        """The terms over hidden states."""
        return Matching(
            hidden=self.hidden, relations=self.relations, causal=self.causal
        )

    def held_variables(self) -> Variables | None:
        """What the student starts from, and every teacher's weights."""
        student = self.student.held_variables() or {}
        supplied = {
            str(i): _without(held, self._borrowed[i])
            for i, teacher in enumerate(self.teachers)
            if (held := teacher.held_variables()) is not None
        }
        whole = {**student, **({TEACHER: supplied} if supplied else {})}
        return whole or None

    def init(self, key: jax.Array, variables: Variables | None = None) -> Variables:
        """The student's variables, its projectors, and the teachers held."""
        given = self.held_variables() if variables is None else variables
        given = dict(given or {})
        supplied = given.pop(TEACHER, {})
        student_key, teacher_key, map_key = jax.random.split(key, 3)
        made = dict(self.student.init(student_key, given or None))
        held = {}
        for i, teacher in enumerate(self.teachers):
            drawn = jax.random.fold_in(teacher_key, i)
            variables = teacher.init(drawn, supplied.get(str(i)))
            if variables:
                held[str(i)] = dict(variables)
        whole = {**made, **({TEACHER: held} if held else {})}
        return self._with_projectors(whole, map_key)

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Mean, Aux[Any]]:
        """The weighted sum of all terms, over the student's mass."""
        ours, weights, aux = self._read_student(params, batch, step)
        mass = jnp.sum(weights)
        total = jnp.zeros(())
        metrics: dict[str, Any] = {}
        for i, teacher in enumerate(self.teachers):
            scored = teacher.score(
                self.teacher_variables(params, i),
                batch,
                step,
                layers=self.matching.teacher_layers if i == 0 else (),
                split=self._chunk(batch) is not None,
            )
            found = self._term_sums(i, ours, scored, weights, batch, step)
            if i == 0:
                matched = self.matching.sums(
                    ours.hidden,
                    scored.hidden,
                    params["params"].get(PROJECTORS, {}),
                    batch,
                    weights,
                    step,
                )
                found = {**found, **matched}
            for name, (weight, value) in found.items():
                weight = jnp.asarray(weight, value.dtype)
                total = total + jnp.where(weight == 0, 0, weight * value)
                prefix = f"teacher_{i + 1}/" if i else ""
                metrics[prefix + name] = jax.lax.stop_gradient(Mean(value, mass))
        return Mean(total, mass), replace(aux, metrics={**metrics, **aux.metrics})

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> Artifacts | None:
        """What the student's own objective makes of it."""
        return self.student.evaluate(student_variables(params), batch, step)

    def apply_effects(self, variables: Variables, effects: Any) -> Variables:
        """As the student's objective applies them."""
        return self.student.apply_effects(student_variables(variables), effects)

    def pipeline(self, state: TrainState, *, ema: bool = True) -> Task:
        """The student's task; teachers and projectors are left behind."""
        averaged = None if state.ema is None else student_variables(state.ema)
        student = replace(
            state, variables=student_variables(state.variables), ema=averaged
        )
        return self.student.pipeline(student, ema=ema)

    def teacher_variables(self, params: Variables, i: int) -> Variables:
        """A teacher's whole variables, with what it borrows from the student's."""
        held = params.get(TEACHER, {}).get(str(i), {})
        borrowed = self._borrowed[i]
        if not borrowed:
            return held
        frozen = flatten({"params": params[FROZEN]})
        return unflatten(flatten(held) | {path: frozen[path] for path in borrowed})

    @cached_property
    def _borrowed(self) -> tuple[frozenset[Path], ...]:
        """Of each teacher, the paths of leaves that the student holds frozen anyway."""
        supplied = self.student.held_variables()
        if supplied is None:
            return tuple(frozenset() for _ in self.teachers)
        key = jax.random.key(0)
        ours = flatten(supplied)
        made = jax.eval_shape(self.student.init, key, supplied)
        frozen = flatten({"params": made.get(FROZEN, {})})
        borrowed = []
        for teacher in self.teachers:
            theirs = flatten(teacher.held_variables() or {})
            same = [p for p in theirs if p in frozen and ours.get(p) is theirs[p]]
            cast = jax.eval_shape(teacher.init, key, unflatten(theirs)) if same else {}
            kept = flatten(cast)
            borrowed.append(
                frozenset(p for p in same if kept[p].dtype == frozen[p].dtype)
            )
        return tuple(borrowed)

    @cached_property
    def _splits(self) -> bool:
        able = isinstance(self.student, Splittable)
        return able and all(teacher.is_splittable for teacher in self.teachers)

    def _chunk(self, batch: Batch) -> int | None:
        """How many positions at a time, None for all at once without `unembed`."""
        if self.chunk != "auto":
            return self.chunk
        if not self._splits or any(isinstance(t, WHOLE) for t in self.terms):
            return None
        rows, length = batch["tokens"].shape
        row_bytes = 4 * rows * self._vocab
        if row_bytes * length <= WHOLE_BYTES:
            return None
        return max(1, min(length, WHOLE_BYTES // 4 // row_bytes))

    @cached_property
    def _vocab(self) -> int:
        """How many rows the student's logits have."""
        tokens = {name: _rows(spec) for name, spec in self.inputs.items()}

        def logits() -> Array:
            variables = self.student.init(jax.random.key(0))
            batch = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tokens)
            said = self.student.predict(variables, batch, _start(), train=False)[2]
            return said.logits

        return jax.eval_shape(logits).shape[-1]

    def _read_student(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Scored, Float[Array, "batch seq"], Aux[Any]]:
        """The student's scores in training, the weights that count, and its reports."""
        own = student_variables(params)
        layers = self.matching.student_layers
        if self._chunk(batch) is not None and isinstance(self.student, Splittable):
            states, aux = self.student.states(
                own, batch, step, train=True, layers=layers
            )
            source, whole = self.student.splits(own)
            scores = deferred(source.model, whole, states.final)
            scored, weights = Scored(scores, states.hidden), states.weights
        else:
            _, aux, said = self.student.predict(
                own, batch, step, train=True, layers=layers
            )
            scored = Scored(Whole(Dense(said.logits)), said.hidden)
            weights = said.weights
        weights = jax.lax.stop_gradient(weights)
        if self.per == "sequence":
            weights = sequence_weights(weights)
        return scored, weights, aux

    def _term_sums(
        self,
        i: int,
        ours: Scored,
        theirs: Scored,
        weights: Float[Array, "batch seq"],
        batch: Batch,
        step: Step,
    ) -> dict[str, tuple[Any, Array]]:
        """Weight and unweighted sum of every term against one teacher, by name."""
        terms = [t for t in self.terms if i == 0 or not isinstance(t, CrossEntropy)]
        # Cut off from the student: what is only watched costs no backward pass.
        watched = [Watched(term) for term in self.watched] if i == 0 else []
        sums = term_sums(
            [*terms, *watched],
            ours.scores,
            theirs.scores,
            weights=weights,
            labels=jnp.roll(batch["tokens"], -1, axis=1),
            step=step.step,
            chunk=self._chunk(batch),
        )
        share = at(self.teachers[i].weight, step.step)
        found = {}
        for name, term, value in zip(names(terms), terms, sums, strict=False):
            weight = jnp.asarray(at(term.weight, step.step), value.dtype)
            if not isinstance(term, CrossEntropy):
                weight = weight * jnp.asarray(share, value.dtype)
            found[name] = (weight, value)
        seen = names([term.term for term in watched])
        for name, value in zip(seen, sums[len(terms) :], strict=True):
            found[f"watch/{name}"] = (0.0, value)
        return found

    def _with_projectors(self, whole: dict[str, Any], key: Array) -> dict[str, Any]:
        """Adds a map for each pair of layers whose widths differ."""
        if not self.hidden:
            return whole
        if PROJECTORS in whole["params"]:
            raise ValueError(
                f"the student has parameters of its own under {PROJECTORS!r}, where "
                "the projectors go; rename them"
            )
        ours, theirs = self._widths(whole)
        made = {
            f"{term}_{pair}": projector(jax.random.fold_in(key, 1000 * term + pair), *w)
            for term, pair, w in self.matching.unequal(ours, theirs)
        }
        if not made:
            return whole
        return {**whole, "params": {**whole["params"], PROJECTORS: made}}

    def _widths(self, whole: dict[str, Any]) -> tuple[list[int], list[int]]:
        """The widths of the states to be matched, on both sides."""
        batch = {name: _rows(spec) for name, spec in self.inputs.items()}

        def states(variables: Variables, batch: Batch) -> tuple[Any, Any]:
            ours = self._read_student(variables, batch, _start())[0].hidden
            theirs = self.teachers[0].score(
                self.teacher_variables(variables, 0),
                batch,
                _start(),
                layers=self.matching.teacher_layers,
                split=False,
            )
            return ours, theirs.hidden

        shapes = jax.eval_shape(states, whole, batch)
        ours, theirs = ([s.shape[-1] for s in side] for side in shapes)
        return ours, theirs


WHOLE = (PolicyGradient, ULD)
"""Terms that `auto` leaves whole: they may look at more than one position."""


def student_variables(params: Variables) -> dict[str, Any]:
    """The variables without teachers and projectors."""
    kept = {name: tree for name, tree in params.items() if name != TEACHER}
    if "params" in kept:
        live = kept["params"].items()
        kept["params"] = {name: tree for name, tree in live if name != PROJECTORS}
    return kept


def _start() -> Step:
    """A step for looking at shapes."""
    return Step(step=jnp.int32(0), key=jax.random.key(0))


def _rows(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)


def _without(tree: Variables, paths: frozenset[Path]) -> Variables:
    if not paths:
        return tree
    return unflatten({p: leaf for p, leaf in flatten(tree).items() if p not in paths})
