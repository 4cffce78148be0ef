"""Teachers by where they run: in the step, or before it with scores in the batch.

All give a loss the same: scores of every position in one form or another, and the
hidden states it asked for. No gradient reaches any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dew.losses.chunking import MaterialisedScores
from dew.losses.diagnostics import (
    Agreement,
    EntropyGap,
    MassOnTop,
    TeacherCrossEntropy,
)
from dew.losses.divergences import ForwardKL
from dew.losses.scores import DenseScores, Scores
from dew.losses.sparse_scores import SampledScores, TopKScores, draw, top_k
from dew.losses.term import Schedule, Term
from dew.losses.vocabulary import VocabularyMap
from dew.objectives.base import Objective, Step
from dew.objectives.distillation.scoring import Scored, score
from dew.objectives.tokens import Splittable, next_token_weights
from dew.typing import Batch, Variables


@runtime_checkable
class Teacher(Protocol):
    """Something that scores batches and never learns.

    `weight` multiplies all that is learned from it.
    """

    @property
    def weight(self) -> Schedule:
        """What it counts for among several teachers."""
        ...

    @property
    def scores_type(self) -> type[Scores]:
        """The form of its scores, which decides what terms it can serve."""
        ...

    @property
    def supports_chunking(self) -> bool:
        """Whether it can be scored a chunk of the sequence at a time."""
        ...

    @property
    def scores_any_tokens(self) -> bool:
        """Whether it can score tokens that the batch did not come with."""
        ...

    @property
    def measures(self) -> tuple[Term, ...]:
        """What can be watched against it, as terms of no weight."""
        ...

    def batch_spec(self, rows: int, seq: int) -> Batch:
        """What a batch must have for it, as shapes to plan with."""
        ...

    def held_variables(self) -> Variables | None:
        """The weights it was loaded with, if it has any here."""
        ...

    def init(self, key: Array, variables: Variables | None) -> Variables:
        """The variables it scores with; empty where it runs elsewhere."""
        ...

    def score(
        self,
        variables: Variables,
        batch: Batch,
        step: Step,
        *,
        layers: Sequence[int],
        split: bool,
        maps: Sequence[int] = (),
    ) -> Scored:
        """Scores every position; `split` puts the logits off to the chunks.

        `layers` and `maps` are the blocks whose states and attention are asked for.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelTeacher:
    """A teacher that runs in the step: any objective of ours that scores tokens.

    A lowered torch module is one by its source. With `vocabulary` it reads and scores
    its own tokens: those of the student are looked up first, and one that the teacher
    lacks, which can only be an added special, is read as its token 0.
    """

    objective: Objective[Any, Any]
    vocabulary: VocabularyMap | None = None
    weight: Schedule = 1.0
    top: int = 10

    @property
    def scores_type(self) -> type[Scores]:
        """The form of its scores: logits."""
        return DenseScores

    @property
    def supports_chunking(self) -> bool:
        """Whether the objective gives final states and their unembedding apart."""
        return isinstance(self.objective, Splittable)

    @property
    def scores_any_tokens(self) -> bool:
        """It runs there."""
        return True

    @property
    def measures(self) -> tuple[Term, ...]:
        """All there are."""
        known = (Agreement(), MassOnTop(k=self.top), EntropyGap())
        if self.vocabulary is not None and self.vocabulary.kind != "identical":
            return (ForwardKL(), *known)
        return (ForwardKL(), *known, TeacherCrossEntropy())

    def batch_spec(self, rows: int, seq: int) -> Batch:
        """Nothing but the text."""
        return {}

    def held_variables(self) -> Variables | None:
        """The objective's own."""
        return self.objective.held_variables()

    def init(self, key: Array, variables: Variables | None) -> Variables:
        """As the objective has them."""
        return self.objective.init(key, variables)

    def score(
        self,
        variables: Variables,
        batch: Batch,
        step: Step,
        *,
        layers: Sequence[int],
        split: bool,
        maps: Sequence[int] = (),
    ) -> Scored:
        """One forward without dropout."""
        return score(
            self.objective,
            lax.stop_gradient(variables),
            self._own(batch),
            step,
            train=False,
            layers=layers,
            maps=maps,
            split=split,
            vocabulary=self.vocabulary,
        )[0]

    def _own(self, batch: Batch) -> Batch:
        """The batch in the teacher's tokens."""
        if self.vocabulary is None or self.vocabulary.kind in ("identical", "padded"):
            return batch
        theirs = self.vocabulary.teacher_tokens(batch["tokens"])
        return {**batch, "tokens": jnp.maximum(theirs, 0).astype(jnp.int32)}


F32 = jnp.float32
IDS, LOG_PROBS, TAIL = "teacher_ids", "teacher_log_probs", "teacher_tail"
WEIGHTS, LOGITS = "teacher_weights", "teacher_logits"

FORMS = {"top_k": TopKScores, "sampled": SampledScores, "logits": DenseScores}
"""The form of scores that each policy of a stored teacher gives."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrecomputedTeacher:
    """A teacher that has scored the batch before: a cache, or a live torch module.

    The batch holds `teacher_ids` and `teacher_log_probs` [batch, seq, k] with
    `teacher_tail` [batch, seq] (`top_k`), `teacher_ids` and `teacher_weights` [batch,
    seq, draws] (`sampled`), or `teacher_logits` [batch, seq, vocab] (`logits`), taken
    at `temperature`. Beside them it may hold the outputs of the teacher's blocks
    `layers`, of `widths`, the first of them as `teacher_hidden_0` [batch, seq, embed].
    """

    policy: Literal["top_k", "sampled", "logits"] = "top_k"
    temperature: float = 1.0
    vocabulary: VocabularyMap | None = None
    weight: Schedule = 1.0
    top: int | None = None
    layers: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.widths):
            raise ValueError(
                "PrecomputedTeacher needs a width for each of its layers, got layers "
                f"{self.layers} and widths {self.widths}"
            )

    @property
    def scores_type(self) -> type[Scores]:
        """The form of the stored scores, by the policy."""
        return FORMS[self.policy]

    @property
    def supports_chunking(self) -> bool:
        """MaterialisedScores scores are cut along the sequence as they are."""
        return True

    @property
    def scores_any_tokens(self) -> bool:
        """It has scored the batch's own tokens and no others."""
        return False

    @property
    def measures(self) -> tuple[Term, ...]:
        """What the policy keeps enough for; all at the temperature of the scores."""
        if self.policy == "sampled":
            return ()
        kl = ForwardKL(temperature=self.temperature, t_squared=False)
        if self.temperature != 1:
            return (kl, Agreement())
        mass = () if self.top is None else (MassOnTop(k=self.top),)
        return (kl, Agreement(), *mass, EntropyGap())

    def batch_spec(self, rows: int, seq: int) -> Batch:
        """Its scores, of one class where their number does not matter, and states."""
        made: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(
                (rows, seq, 1), jnp.int32 if name == IDS else F32
            )
            for name in self._needed
        }
        if TAIL in made:
            made[TAIL] = jax.ShapeDtypeStruct((rows, seq), F32)
        for place, width in enumerate(self.widths):
            shape = (rows, seq, width)
            made[hidden_name(place)] = jax.ShapeDtypeStruct(shape, F32)
        return made

    @property
    def _needed(self) -> tuple[str, ...]:
        """The arrays that the policy reads."""
        if self.policy == "logits":
            return (LOGITS,)
        return (IDS, LOG_PROBS, TAIL) if self.policy == "top_k" else (IDS, WEIGHTS)

    def held_variables(self) -> None:
        """It has none here."""
        return None

    def init(self, key: Array, variables: Variables | None) -> Variables:
        """It has none here."""
        return {}

    def score(
        self,
        variables: Variables,
        batch: Batch,
        step: Step,
        *,
        layers: Sequence[int],
        split: bool,
        maps: Sequence[int] = (),
    ) -> Scored:
        """What the batch brings.

        Raises:
            ValueError: it lacks an array, or states are asked of it that it has not.
        """
        needed = self._needed
        kept = [hidden_name(i) for i in range(len(self.layers))]
        missing = [name for name in (*needed, *kept) if name not in batch]
        lost = [layer for layer in layers if layer not in self.layers]
        if missing or lost or maps:
            raise ValueError(
                f"a teacher that scored before the step ({self.policy}) needs "
                f"{', '.join((*needed, *kept))} in the batch and keeps no attention; "
                f"missing are {missing}; of the layers asked for, {list(layers)}, it "
                f"has {list(self.layers)}"
            )
        arrays = [lax.stop_gradient(jnp.asarray(batch[name])) for name in needed]
        hidden = tuple(
            lax.stop_gradient(jnp.asarray(batch[hidden_name(self.layers.index(one))]))
            for one in layers
        )
        scores: DenseScores | TopKScores | SampledScores
        if self.policy == "logits":
            scores = DenseScores(arrays[0], self.vocabulary)
        elif self.policy == "top_k":
            ids, log_probs, tail = arrays
            scores = TopKScores(ids, log_probs, tail, self.temperature, self.vocabulary)
        else:
            ids, weights = arrays
            scores = SampledScores(ids, weights, self.temperature, self.vocabulary)
        return Scored(MaterialisedScores(scores), next_token_weights(batch), hidden)


def hidden_name(place: int) -> str:
    """What a batch calls the states of the teacher's block at a place in `layers`."""
    return f"teacher_hidden_{place}"


def as_teacher(teacher: Objective[Any, Any] | Teacher) -> Teacher:
    """An objective runs in the step; anything else is a teacher already."""
    if isinstance(teacher, Objective):
        return ModelTeacher(objective=teacher)
    return teacher


def scores_of(
    logits: Float[Array, "batch seq vocab"],
    *,
    policy: Literal["top_k", "sampled"],
    k: int,
    key: Array | None,
    temperature: float = 1.0,
) -> dict[str, Array]:
    """A teacher's logits as the arrays of a batch that `PrecomputedTeacher` reads.

    `k` classes are kept, or drawn with `key`.
    """
    if policy == "top_k":
        kept = top_k(logits, k, temperature=temperature)
        return {IDS: kept.ids, LOG_PROBS: kept.log_probs, TAIL: kept.tail}
    if key is None:
        raise ValueError("drawing from a teacher needs a key, got None")
    drawn = draw(key, logits, k, temperature=temperature)
    return {IDS: drawn.ids, WEIGHTS: drawn.weights}
