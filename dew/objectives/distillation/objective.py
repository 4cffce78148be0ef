"""Distillation: a student is trained on the scores of one or more teachers.

    objective = Distillation(
        student=CausalLM(source=small, seq_len=1024),
        teacher=CausalLM(source=large, seq_len=1024),
        terms=(ForwardKL(temperature=2.0), CrossEntropy(weight=0.5)),
    )

The loss is the weighted sum of all terms over the student's own mass, one `Mean`: so
accumulation, masks, packing and devices cannot change it, and no replay is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dew.losses.chunking import sequence_weights, term_sums
from dew.losses.diagnostics import Monitored
from dew.losses.divergences import (
    CrossEntropy,
    Divergence,
    ForwardKL,
    SoftCrossEntropy,
    TopKTail,
)
from dew.losses.hidden_states import StateTerm
from dew.losses.scores import misfit
from dew.losses.term import LossInputs, Term, at, names
from dew.nn.block import DecoderBank
from dew.objectives.base import (
    Artifacts,
    Aux,
    EMASpec,
    InputSpec,
    Mean,
    Objective,
    Prediction,
    Step,
    Task,
)
from dew.objectives.distillation.encoder_states import EncoderStates
from dew.objectives.distillation.matching import Matching, Weighted
from dew.objectives.distillation.on_policy import OnPolicy
from dew.objectives.distillation.scoring import (
    Scored,
    keeps_attention,
    no_attention,
    score,
    splits,
)
from dew.objectives.distillation.sides import objective_faults, teacher_faults
from dew.objectives.distillation.teachers import (
    PrecomputedTeacher,
    Teacher,
    as_teacher,
)
from dew.objectives.distillation.variables import (
    PROJECTORS,
    TEACHER,
    drop_paths,
    shared_leaves,
    student_step,
    student_variables,
)
from dew.objectives.tokens import Labelled, Splittable
from dew.state import TrainState
from dew.tree import FROZEN, flatten, unflatten
from dew.typing import Batch, Path, Variables

WHOLE_BYTES = 2**28
"""Student logits above this size are chunked by `auto`, into pieces a quarter of it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Distillation(Objective[Mean, Any]):
    """Loss terms between a student and its teachers, over the student's positions.

    Teachers are in the collection `teacher`: they get no gradient, no optimizer state,
    no place in a checkpoint (which records their hash) and none in an export. Leaves
    that a teacher shares with the student's frozen ones are stored once, as for the
    base model of an adapter. Terms of the student alone (`CrossEntropy`, and
    `StudentLoss` for whatever its own objective computes) count once whatever the
    teachers' weights are. A term over hidden states or attention is
    computed with the one teacher that it names; hidden states of unequal width are
    matched by projectors that train below `params/projectors`.

    `predict`, evaluations, previews, effects and reports are the student's, which never
    sees the teachers or the projectors, not in the averaged weights of its step either.

    Attributes:
        student: the objective that is trained, and whose positions count; any that has
            `predict`.
        teacher: the first teacher, which the diagnostics are computed against; an
            objective runs in the step as a `ModelTeacher`.
        others: further teachers, each with a weight of its own.
        terms: the losses, over logits, hidden states or attention.
        on_policy: the sampling of some rows by the student, if any.
        measures: the diagnostics; None computes all that the first teacher supports,
            () computes none and saves their time.
        per: whether the loss is a mean over tokens, or over sequences of any length.
        chunk: positions at a time, so that neither side's logits are ever whole;
            `auto` chunks where they would be large.
        causal: whether relations and attention are compared for earlier keys only.
        ema: the average that is kept; the student's where it is None.

    Raises:
        TypeError: student, teachers or terms are of another kind; what they lack and
            what to give instead are named.
        ValueError: terms, teachers and options do not fit together; all faults are
            named.

    >>> import dew
    >>> from dew.losses import CrossEntropy, ForwardKL
    >>> from dew.objectives import CausalLM
    >>> model = CausalLM(source=dew.load(FOLDER), seq_len=8)
    >>> terms = (ForwardKL(temperature=2.0), CrossEntropy(weight=0.5))
    >>> objective = Distillation(student=model, teacher=model, terms=terms)
    >>> [type(term).__name__ for term in objective.diagnostics]
    ['ForwardKL', 'Agreement', 'MassOnTop', 'EntropyGap', 'TeacherCrossEntropy', \
'CrossEntropy']
    """

    student: Objective[Any, Any]
    teacher: Objective[Any, Any] | Teacher
    others: tuple[Objective[Any, Any] | Teacher, ...] = ()
    terms: tuple[Term, ...] = (ForwardKL(),)
    on_policy: OnPolicy | None = None
    measures: tuple[Term, ...] | None = None
    per: Literal["token", "sequence"] = "token"
    chunk: int | Literal["auto"] | None = "auto"
    causal: bool = True
    ema: EMASpec | None = None

    def __post_init__(self) -> None:
        strangers = self._strangers()
        if strangers:
            raise TypeError("Distillation: " + "; ".join(strangers))
        faults = self._faults()
        if faults:
            raise ValueError("; ".join(faults))
        if self.ema is None:
            object.__setattr__(self, "ema", self.student.ema)

    def _strangers(self) -> list[str]:
        """Returns a message for each part that is not of the kind it must be."""
        faults = objective_faults("student", self.student)
        faults += teacher_faults("teacher", self.teacher, Teacher)
        if not isinstance(self.others, tuple):
            faults.append(f"others must be a tuple, got {self.others!r}")
        else:
            for i, other in enumerate(self.others):
                faults += teacher_faults(f"others[{i}]", other, Teacher)
        for name, terms in (("terms", self.terms), ("measures", self.measures or ())):
            if not isinstance(terms, tuple):
                faults.append(f"{name} must be a tuple of terms, got {terms!r}")
                continue
            faults += [
                f"{name}[{i}] must be a term such as ForwardKL(), got {term!r}"
                for i, term in enumerate(terms)
                if not isinstance(term, Term)
            ]
        return faults

    def _faults(self) -> list[str]:
        """Returns a message for each thing that does not fit the others."""
        faults = self._matching.faults(len(self.teachers)) + self._misfits()
        for i, teacher in enumerate(self.teachers):
            if isinstance(teacher, PrecomputedTeacher):
                faults += self._untempered(i, teacher)
        if not self.terms:
            faults.append("Distillation needs at least one term, got none")
        asking = [type(t).__name__ for t in self.terms if t.needs_labels]
        if asking and not isinstance(self.student, Labelled):
            faults.append(
                f"{', '.join(asking)} need a student with `labels`, and "
                f"{type(self.student).__name__} scores no tokens"
            )
        if isinstance(self.chunk, int) and not self._splits:
            faults.append(
                f"chunk={self.chunk} needs a student and teachers that give final "
                "states and their unembedding apart, and terms over neither attention "
                "maps nor the student's own loss; use chunk=None"
            )
        if any(t.reads == "attention" for t in self.terms) and not keeps_attention(
            self.student
        ):
            faults.append(no_attention(self.student))
        if self.on_policy is not None and not self._can_sample:
            faults.append(
                "on_policy needs a causal student that samples, and teachers that run "
                "in the step: live ones and caches have scored the data, not what the "
                "student writes"
            )
        return faults

    @property
    def artifact(self) -> type | None:
        """The type that the student's evaluation returns."""
        return self.student.artifact

    @property
    def held(self) -> tuple[str, ...]:
        """The collections that never move: the student's own, and the teachers'."""
        return (*dict.fromkeys((*self.student.held, FROZEN)), TEACHER)

    @property
    def inputs(self) -> InputSpec:
        """Shapes and dtypes of one example of the student."""
        return self.student.inputs

    @property
    def bank_sites(self) -> tuple[DecoderBank, ...]:
        """The scanned block stacks of the student, usually none."""
        return self.student.bank_sites

    @cached_property
    def teachers(self) -> tuple[Teacher, ...]:
        """All teachers; the first is the one that diagnostics are computed against."""
        return tuple(as_teacher(one) for one in (self.teacher, *self.others))

    @cached_property
    def diagnostics(self) -> tuple[Term, ...]:
        """Terms that are logged under `watch/` and have no part in the loss."""
        if self.measures is not None:
            return self.measures
        if isinstance(self.student, EncoderStates):
            return ()  # It has no logits to measure.
        measures = (*self.teachers[0].measures, CrossEntropy())
        if isinstance(self.student, Labelled):
            return measures
        return tuple(m for m in measures if not m.needs_labels)

    @cached_property
    def _logit_terms(self) -> tuple[Term, ...]:
        """The terms over logits, in their order."""
        return tuple(term for term in self.terms if term.reads == "logits")

    @cached_property
    def _matching(self) -> Matching:
        """The terms over hidden states and attention, in their order."""
        terms = tuple(term for term in self.terms if isinstance(term, StateTerm))
        return Matching(terms=terms, causal=self.causal)

    def _misfits(self) -> list[str]:
        """Returns a message for each term that a teacher's scores cannot serve."""
        terms = [(i, t) for i in range(len(self.teachers)) for t in self._logit_terms]
        terms += [(0, t) for t in self.measures or ()]
        return [
            f"teacher {i}, a {type(self.teachers[i]).__name__}: "
            + misfit(term, term.needs_scores, self.teachers[i].scores_type)
            for i, term in terms
            if term.needs_scores is not None
            and not issubclass(self.teachers[i].scores_type, term.needs_scores)
        ]

    def _untempered(self, i: int, teacher: PrecomputedTeacher) -> list[str]:
        """Returns a message for each term at another temperature than stored scores."""
        if teacher.policy == "logits":
            return []
        return [
            f"teacher {i} scored at temperature {teacher.temperature}, "
            f"{type(term).__name__}.temperature must be that number, got "
            f"{'a schedule' if callable(term.temperature) else term.temperature}"
            for term in self._logit_terms
            if isinstance(term, Divergence | SoftCrossEntropy | TopKTail)
            and term.temperature != teacher.temperature
        ]

    def held_variables(self) -> Variables | None:
        """Returns the loaded variables of the student and of every teacher."""
        student = self.student.held_variables() or {}
        supplied = {
            str(i): drop_paths(held, self._shared_leaves[i])
            for i, teacher in enumerate(self.teachers)
            if (held := teacher.held_variables()) is not None
        }
        variables = {**student, **({TEACHER: supplied} if supplied else {})}
        return variables or None

    def init(self, key: jax.Array, variables: Variables | None = None) -> Variables:
        """Returns the variables of the student, its projectors and the teachers."""
        given = self.held_variables() if variables is None else variables
        given = dict(given or {})
        supplied = given.pop(TEACHER, {})
        student_key, teacher_key, map_key = jax.random.split(key, 3)
        student = dict(self.student.init(student_key, given or None))
        held = {}
        for i, teacher in enumerate(self.teachers):
            drawn = jax.random.fold_in(teacher_key, i)
            variables = teacher.init(drawn, supplied.get(str(i)))
            if variables:
                held[str(i)] = dict(variables)
        both = {**student, **({TEACHER: held} if held else {})}
        return self._with_projectors(both, map_key)

    def loss(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Mean, Aux[Any]]:
        """Returns the weighted sum of all terms, over the student's mass."""
        batch, metrics = self._with_samples(params, batch, step)
        chunk = self._chunk(batch)
        step = student_step(step)
        student, aux = self._score_student(params, batch, step, split=chunk is not None)
        mass = jnp.sum(student.weights)
        total = jnp.zeros(())
        for i in range(len(self.teachers)):
            teacher = self._score_teacher(
                params, i, batch, step, split=chunk is not None
            )
            sums = self._term_sums(i, student, teacher, batch, step, chunk=chunk)
            sums |= self._student_sums(student, step) if i == 0 else {}
            sums |= self._matching.sums(
                i,
                student=student,
                teacher=teacher,
                projectors=params["params"].get(PROJECTORS, {}),
                batch=batch,
                step=step,
            )
            for name, (weight, value) in sums.items():
                weight = jnp.asarray(weight, value.dtype)
                # Not weight * value alone: 0 * inf is NaN, and a diagnostic may be inf.
                total = total + jnp.where(weight == 0, 0, weight * value)
                prefix = f"teacher_{i + 1}/" if i else ""
                metrics[prefix + name] = jax.lax.stop_gradient(Mean(value, mass))
        return Mean(total, mass), replace(aux, metrics=_joined(metrics, aux.metrics))

    def predict(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        train: bool,
        layers: Sequence[int] = (),
    ) -> tuple[Mean, Aux[Any], Prediction]:
        """Returns what the student's own objective predicts, and its own loss."""
        return self.student.predict(
            student_variables(params),
            batch,
            student_step(step),
            train=train,
            layers=layers,
        )

    def evaluate(self, params: Variables, batch: Batch, step: Step) -> Artifacts | None:
        """Returns the evaluation of the student's own objective."""
        variables = student_variables(params)
        return self.student.evaluate(variables, batch, student_step(step))

    def preview(
        self,
        params: Variables,
        batch: Batch,
        step: Step,
        *,
        scored: Artifacts | None = None,
    ) -> Artifacts | None:
        """Returns what the student's own objective displays."""
        variables, step = student_variables(params), student_step(step)
        return self.student.preview(variables, batch, step, scored=scored)

    def apply_effects(self, variables: Variables, effects: Any) -> Variables:
        """Returns the collections that the student's objective replaces."""
        return self.student.apply_effects(student_variables(variables), effects)

    def pipeline(self, state: TrainState, *, ema: bool = True) -> Task:
        """Returns the student's task, without teachers and projectors."""
        averaged = None if state.ema is None else student_variables(state.ema)
        student = replace(
            state, variables=student_variables(state.variables), ema=averaged
        )
        return self.student.pipeline(student, ema=ema)

    def teacher_variables(self, params: Variables, i: int) -> Variables:
        """Returns a teacher's variables, with the leaves it shares with the student."""
        held = params.get(TEACHER, {}).get(str(i), {})
        borrowed = self._shared_leaves[i]
        if not borrowed:
            return held
        frozen = flatten({"params": params[FROZEN]})
        return unflatten(flatten(held) | {path: frozen[path] for path in borrowed})

    @cached_property
    def _shared_leaves(self) -> tuple[frozenset[Path], ...]:
        """For each teacher, the paths of leaves that the student has frozen anyway."""
        return shared_leaves(self.student, self.teachers)

    @cached_property
    def _splits(self) -> bool:
        able = splits(self.student) and not any(
            term.reads in ("attention", "loss") for term in self.terms
        )
        return able and all(teacher.supports_chunking for teacher in self.teachers)

    @cached_property
    def _can_sample(self) -> bool:
        able = isinstance(self.student, Splittable)
        return able and all(teacher.scores_any_tokens for teacher in self.teachers)

    def _with_samples(
        self, params: Variables, batch: Batch, step: Step
    ) -> tuple[Batch, dict[str, Mean]]:
        """Returns the batch with the rows that the student samples, and counts."""
        if self.on_policy is None or not isinstance(self.student, Splittable):
            return batch, {}
        source, variables = self.student.splits(student_variables(params))
        return self.on_policy.sample_rows(source, variables, batch, step)

    def _score_student(
        self, params: Variables, batch: Batch, step: Step, *, split: bool
    ) -> tuple[Scored, Aux[Any]]:
        """Runs the student in training; weighted for the mean that `per` names."""
        scored, aux = score(
            self.student,
            student_variables(params),
            batch,
            step,
            train=True,
            layers=self._matching.student_layers("hidden"),
            maps=self._matching.student_layers("attention"),
            split=split,
        )
        weights = jax.lax.stop_gradient(scored.weights)
        if self.per == "sequence":
            weights = sequence_weights(weights)
        return replace(scored, weights=weights), aux

    def _score_teacher(
        self, params: Variables, i: int, batch: Batch, step: Step, *, split: bool
    ) -> Scored:
        """Runs one teacher, with the layers that its terms compare."""
        return self.teachers[i].score(
            self.teacher_variables(params, i),
            batch,
            step,
            layers=self._matching.teacher_layers("hidden", i),
            split=split,
            maps=self._matching.teacher_layers("attention", i),
        )

    def _chunk(self, batch: Batch) -> int | None:
        """Returns how many positions are scored at a time, None for all at once."""
        if self.chunk != "auto":
            return self.chunk
        if not self._splits or any(t.whole_sequence for t in self._logit_terms):
            return None
        rows, length = batch["tokens"].shape
        row_bytes = 4 * rows * self._vocab
        if row_bytes * length <= WHOLE_BYTES:
            return None
        return max(1, min(length, WHOLE_BYTES // 4 // row_bytes))

    @cached_property
    def _vocab(self) -> int:
        """The number of classes in the student's logits, padding included."""
        tokens = {name: _rows(spec) for name, spec in self.inputs.items()}

        def logits() -> Array:
            variables = self.student.init(jax.random.key(0))
            batch = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tokens)
            return self.student.predict(variables, batch, _start(), train=False)[
                2
            ].logits

        return jax.eval_shape(logits).shape[-1]

    def _term_sums(
        self,
        i: int,
        student: Scored,
        teacher: Scored,
        batch: Batch,
        step: Step,
        *,
        chunk: int | None,
    ) -> Weighted:
        """Returns weight and unweighted sum of every term over logits, by name."""
        terms = [t for t in self._logit_terms if i == 0 or not t.student_only]
        # Without a gradient: a diagnostic costs no backward pass.
        monitored = [Monitored(term) for term in self.diagnostics] if i == 0 else []
        labels = None
        if isinstance(self.student, Labelled):
            labels = self.student.labels(batch, step)
        sums = term_sums(
            [*terms, *monitored],
            student.scores,
            teacher.scores,
            weights=student.weights,
            labels=labels,
            step=step.step,
            chunk=chunk,
        )
        share = at(self.teachers[i].weight, step.step)
        weighted: Weighted = {}
        for name, term, value in zip(names(terms), terms, sums, strict=False):
            weight = jnp.asarray(at(term.weight, step.step), value.dtype)
            if not term.student_only:
                weight = weight * jnp.asarray(share, value.dtype)
            weighted[name] = (weight, value)
        diagnostics = names([term.term for term in monitored])
        for name, value in zip(diagnostics, sums[len(terms) :], strict=True):
            weighted[f"watch/{name}"] = (0.0, value)
        return weighted

    def _student_sums(self, student: Scored, step: Step) -> Weighted:
        """Returns weight and unweighted sum of each term on the student's own loss."""
        terms = [term for term in self.terms if term.reads == "loss"]
        if not terms or student.losses is None:
            return {}
        inputs = LossInputs(student.losses)
        return {
            name: (
                at(term.weight, step.step),
                Mean.of(term.values(inputs), student.weights).total,
            )
            for name, term in zip(names(terms), terms, strict=True)
        }

    def _with_projectors(self, variables: dict[str, Any], key: Array) -> dict[str, Any]:
        """Adds a projector for each pair of layers whose widths differ."""
        if not self._matching.projecting:
            return variables
        if PROJECTORS in variables["params"]:
            raise ValueError(
                f"the student has parameters of its own under {PROJECTORS!r}, where "
                "the projectors go; rename them"
            )
        projectors = self._matching.projectors(key, *self._widths(variables))
        if not projectors:
            return variables
        params = {**variables["params"], PROJECTORS: projectors}
        return {**variables, "params": params}

    def _widths(
        self, variables: Variables
    ) -> tuple[dict[int, int], dict[int, dict[int, int]]]:
        """Returns the width of each layer to be matched, and that of each teacher's."""
        batch = {name: _rows(spec) for name, spec in self.inputs.items()}
        teachers = {term.teacher for term in self._matching.projecting}
        for i in teachers:
            batch |= self.teachers[i].batch_spec(*batch["tokens"].shape)

        def states(variables: Variables, batch: Batch) -> tuple[Any, dict[int, Any]]:
            split = self._chunk(batch) is not None
            step = _start()
            student, _ = self._score_student(variables, batch, step, split=split)
            return student.hidden, {
                i: self._score_teacher(variables, i, batch, step, split=split).hidden
                for i in teachers
            }

        student, taught = jax.eval_shape(states, variables, batch)
        matching = self._matching
        return (
            _by_layer(matching.student_layers("hidden"), student),
            {
                i: _by_layer(matching.teacher_layers("hidden", i), taught[i])
                for i in teachers
            },
        )


def _joined(terms: dict[str, Mean], reports: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics of the terms and those that the student reports.

    Raises:
        ValueError: the student reports one under the name of a term.
    """
    both = sorted(set(terms) & set(reports))
    if both:
        raise ValueError(
            f"the student reports metrics under the names of terms, {', '.join(both)}; "
            "rename them in its Aux"
        )
    return {**terms, **reports}


def _by_layer(
    layers: Sequence[int], states: Sequence[jax.ShapeDtypeStruct]
) -> dict[int, int]:
    """Returns the width of each layer's states."""
    return {layer: state.shape[-1] for layer, state in zip(layers, states, strict=True)}


def _start() -> Step:
    """Returns a first step, for the evaluation of shapes."""
    return Step(step=jnp.int32(0), key=jax.random.key(0))


def _rows(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)
