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
from jaxtyping import Array

from dew.losses.chunking import sequence_weights, term_sums
from dew.losses.diagnostics import Monitored, TeacherCrossEntropy
from dew.losses.divergences import CrossEntropy, ForwardKL
from dew.losses.hidden_states import (
    AttentionMap,
    HiddenCosine,
    HiddenMSE,
    Relation,
)
from dew.losses.policy_gradient import PolicyGradient
from dew.losses.term import Term, at, names
from dew.losses.uld import ULD
from dew.nn.block import DecoderBank
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
from dew.objectives.distillation.matching import Matching
from dew.objectives.distillation.on_policy import OnPolicy
from dew.objectives.distillation.scoring import Scored, score
from dew.objectives.distillation.teachers import Teacher, as_teacher
from dew.objectives.distillation.variables import (
    PROJECTORS,
    TEACHER,
    drop_paths,
    shared_leaves,
    student_variables,
)
from dew.objectives.tokens import Labelled, Splittable, TokenScores
from dew.state import TrainState
from dew.tree import FROZEN, flatten, unflatten
from dew.typing import Batch, Path, Variables

WHOLE_BYTES = 2**28
"""Student logits above this size are chunked by `auto`, into pieces a quarter of it."""

WHOLE = (PolicyGradient, ULD)
"""Terms that `auto` leaves whole: they may look at more than one position."""

LABELLED = (CrossEntropy, TeacherCrossEntropy, PolicyGradient)
"""Terms that ask which token a position is scored on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Distillation(Objective[Mean, Any]):
    """Terms between a student and its teachers, over the student's own positions.

    Teachers are held in the collection `teacher`: they get no gradient, no optimizer
    state, no place in a checkpoint (their hash has) and none in an export. Leaves that
    a teacher shares with what the student has frozen are kept once, as for the base
    model of an adapter. Terms that are the student's alone (`CrossEntropy`) count once
    whatever the teachers' weights are; `hidden`, `relations` and attention `maps` are
    each matched with one teacher, states of unequal width by projectors that train
    below `params/projectors`. `on_policy` lets the student write some of the rows.

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
    maps: tuple[AttentionMap, ...] = ()
    on_policy: OnPolicy | None = None
    measures: tuple[Term, ...] | None = None
    per: Literal["token", "sequence"] = "token"
    chunk: int | Literal["auto"] | None = "auto"
    causal: bool = True
    ema: EMASpec | None = None

    artifact: ClassVar[type | None] = TokenScores
    held: ClassVar[tuple[str, ...]] = (FROZEN, TEACHER)

    def __post_init__(self) -> None:
        faults = self.matching.faults(len(self.teachers))
        if not (self.terms or self.hidden or self.relations or self.maps):
            faults.append("Distillation needs at least one term, got none")
        asking = [type(t).__name__ for t in self.terms if isinstance(t, LABELLED)]
        if asking and not isinstance(self.student, Labelled):
            faults.append(
                f"{', '.join(asking)} need a student with `labels`, and "
                f"{type(self.student).__name__} scores no tokens"
            )
        if isinstance(self.chunk, int) and not self._splits:
            faults.append(
                f"chunk={self.chunk} needs a student and teachers that give final "
                "states and their unembedding apart, and no attention maps; use "
                "chunk=None"
            )
        if self.on_policy is not None and not self._can_sample:
            faults.append(
                "on_policy needs a causal student that samples, and teachers that run "
                "in the step: live ones and caches have scored the data, not what the "
                "student writes"
            )
        if faults:
            raise ValueError("; ".join(faults))
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
    def diagnostics(self) -> tuple[Term, ...]:
        """The measures, without those that are terms at weight 1 anyway."""
        if self.measures is not None:
            return self.measures
        measures = (*self.teachers[0].measures, CrossEntropy())
        if isinstance(self.student, Labelled):
            return measures
        return tuple(m for m in measures if not isinstance(m, LABELLED))

    @cached_property
    def matching(self) -> Matching:
        """The terms over hidden states."""
        return Matching(
            hidden=self.hidden,
            relations=self.relations,
            maps=self.maps,
            causal=self.causal,
        )

    def held_variables(self) -> Variables | None:
        """What the student starts from, and every teacher's weights."""
        student = self.student.held_variables() or {}
        supplied = {
            str(i): drop_paths(held, self._shared_leaves[i])
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
        batch, sampled = self._mixed(params, batch, step)
        ours, aux = self._read_student(params, batch, step)
        mass = jnp.sum(ours.weights)
        total = jnp.zeros(())
        metrics: dict[str, Any] = dict(sampled)
        for i in range(len(self.teachers)):
            scored = self._score(params, i, batch, step)
            found = self._term_sums(i, ours, scored, batch, step)
            found |= self.matching.sums(
                i,
                (ours.hidden, ours.maps),
                (scored.hidden, scored.maps),
                params["params"].get(PROJECTORS, {}),
                batch,
                ours.weights,
                step,
            )
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
        borrowed = self._shared_leaves[i]
        if not borrowed:
            return held
        frozen = flatten({"params": params[FROZEN]})
        return unflatten(flatten(held) | {path: frozen[path] for path in borrowed})

    @cached_property
    def _shared_leaves(self) -> tuple[frozenset[Path], ...]:
        """Of each teacher, the paths of leaves that the student holds frozen anyway."""
        return shared_leaves(self.student, self.teachers)

    @cached_property
    def _splits(self) -> bool:
        able = isinstance(self.student, Splittable) and not self.maps
        return able and all(teacher.supports_chunking for teacher in self.teachers)

    @cached_property
    def _can_sample(self) -> bool:
        able = isinstance(self.student, Splittable)
        return able and all(teacher.scores_any_tokens for teacher in self.teachers)

    def _mixed(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Batch, dict[str, Mean]]:
        """The batch with the rows that the student writes in this step."""
        if self.on_policy is None or not isinstance(self.student, Splittable):
            return batch, {}
        source, whole = self.student.splits(student_variables(params))
        return self.on_policy.mixed(source, whole, batch, step)

    def _score(self, params: Variables, i: int, batch: Batch, step: Step) -> Scored:
        """What one teacher says, with the layers that its terms ask for."""
        return self.teachers[i].score(
            self.teacher_variables(params, i),
            batch,
            step,
            layers=self.matching.teacher_layers(i),
            split=self._chunk(batch) is not None,
            maps=self.matching.teacher_maps(i),
        )

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
    ) -> tuple[Scored, Aux[Any]]:
        """The student's scores in training with the weights of its positions."""
        scored, aux = score(
            self.student,
            student_variables(params),
            batch,
            step,
            train=True,
            layers=self.matching.student_layers,
            maps=self.matching.student_maps,
            split=self._chunk(batch) is not None,
        )
        weights = jax.lax.stop_gradient(scored.weights)
        if self.per == "sequence":
            weights = sequence_weights(weights)
        return replace(scored, weights=weights), aux

    def _labels(self, batch: Batch, step: Step) -> Array | None:
        """The tokens that the student is scored on, if it is a model of tokens."""
        if isinstance(self.student, Labelled):
            return self.student.labels(batch, step)
        return None

    def _term_sums(
        self,
        i: int,
        ours: Scored,
        theirs: Scored,
        batch: Batch,
        step: Step,
    ) -> dict[str, tuple[Any, Array]]:
        """Weight and unweighted sum of every term against one teacher, by name."""
        terms = [t for t in self.terms if i == 0 or not isinstance(t, CrossEntropy)]
        # Cut off from the student: what is only watched costs no backward pass.
        watched = [Monitored(term) for term in self.diagnostics] if i == 0 else []
        sums = term_sums(
            [*terms, *watched],
            ours.scores,
            theirs.scores,
            weights=ours.weights,
            labels=self._labels(batch, step),
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
        made = self.matching.projectors(key, *self._widths(whole))
        if not made:
            return whole
        return {**whole, "params": {**whole["params"], PROJECTORS: made}}

    def _widths(
        self, whole: dict[str, Any]
    ) -> tuple[list[int], dict[int, tuple[int, ...]]]:
        """The widths of the states to be matched, on both sides."""
        batch = {name: _rows(spec) for name, spec in self.inputs.items()}
        asked = {term.teacher for term in self.hidden}
        for i in asked:
            batch |= self.teachers[i].batch_spec(*batch["tokens"].shape)

        def states(variables: Variables, batch: Batch) -> tuple[Any, Any]:
            ours = self._read_student(variables, batch, _start())[0].hidden
            theirs = {
                i: self._score(variables, i, batch, _start()).hidden for i in asked
            }
            return ours, theirs

        ours, theirs = jax.eval_shape(states, whole, batch)
        widths = {i: tuple(s.shape[-1] for s in side) for i, side in theirs.items()}
        return [s.shape[-1] for s in ours], widths


def _start() -> Step:
    """A step for looking at shapes."""
    return Step(step=jnp.int32(0), key=jax.random.key(0))


def _rows(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)
