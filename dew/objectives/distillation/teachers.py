"""Teachers that run inside the training step, or before it with scores in the batch.

Each gives a loss scores of every position in some form, and the hidden states that
the terms compare. No gradient reaches any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from dew.objectives.distillation.scoring import Scored, score, splits
from dew.objectives.distillation.sides import objective_faults
from dew.objectives.tokens import next_token_weights
from dew.typing import Batch, Variables


@runtime_checkable
class Teacher(Protocol):
    """A source of scores for batches, which is not trained.

    Implemented by `ModelTeacher`, `PrecomputedTeacher` and `CrossTokenizerTeacher`.
    """

    @property
    def weight(self) -> Schedule:
        """The factor of all terms with this teacher, except the student's own."""
        ...

    @property
    def scores_type(self) -> type[Scores]:
        """The form of its scores, which decides what terms it can serve."""
        ...

    @property
    def supports_chunking(self) -> bool:
        """Whether its scores can be computed a chunk of the sequence at a time."""
        ...

    @property
    def scores_any_tokens(self) -> bool:
        """Whether it can score tokens that are sampled in the step."""
        ...

    @property
    def measures(self) -> tuple[Term, ...]:
        """The diagnostics that its scores support, as terms of weight zero."""
        ...

    def batch_spec(self, rows: int, seq: int) -> Batch:
        """Returns shapes of the arrays that a batch must have beside the text."""
        ...

    def held_variables(self) -> Variables | None:
        """Returns the weights that it was loaded with, None where it has none here."""
        ...

    def init(self, key: Array, variables: Variables | None) -> Variables:
        """Returns the variables that it scores with; empty where it runs elsewhere."""
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
        """Returns the scores of every position, without a gradient.

        Args:
            variables: what `init` returned.
            batch: the student's batch, with the arrays of `batch_spec`.
            step: the current step, whose `ema` is the student's average.
            layers: blocks whose hidden states are compared.
            split: whether logits may be computed chunk by chunk later.
            maps: blocks whose attention scores are compared.

        Raises:
            ValueError: it cannot give what is requested from this batch.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelTeacher:
    """A teacher that runs inside the training step: any objective that scores tokens.

    The source of the objective may be a lowered torch module. With `vocabulary` it
    reads and scores its own tokens: those of the student are mapped first, and one that
    the teacher lacks, which can only be an added special, becomes its token 0.

    Attributes:
        objective: the objective whose forward pass scores the batch.
        vocabulary: the map between the two vocabularies, None where rows are equal.
        weight: the factor of all terms with this teacher.
        top: how many of the teacher's likeliest tokens `MassOnTop` measures; all of
            them where there are fewer.

    Raises:
        TypeError: what is given is no objective, or one that scores no tokens.
    """

    objective: Objective[Any, Any]
    vocabulary: VocabularyMap | None = None
    weight: Schedule = 1.0
    top: int = 10

    def __post_init__(self) -> None:
        faults = objective_faults("ModelTeacher.objective", self.objective)
        if faults:
            raise TypeError("; ".join(faults))

    @property
    def scores_type(self) -> type[Scores]:
        """The form of its scores: logits."""
        return DenseScores

    @property
    def supports_chunking(self) -> bool:
        """Whether the objective separates hidden states from their unembedding."""
        return splits(self.objective)

    @property
    def scores_any_tokens(self) -> bool:
        """Whether it scores sampled tokens: yes, it runs in the step."""
        return True

    @property
    def measures(self) -> tuple[Term, ...]:
        """The diagnostics against dense logits, by the kind of vocabulary."""
        terms = (Agreement(), MassOnTop(k=self.top), EntropyGap())
        if self.vocabulary is not None and self.vocabulary.kind != "identical":
            return (ForwardKL(), *terms)
        return (ForwardKL(), *terms, TeacherCrossEntropy())

    def batch_spec(self, rows: int, seq: int) -> Batch:
        """Returns the arrays it needs beside the text: none."""
        return {}

    def held_variables(self) -> Variables | None:
        """Returns the loaded variables of the objective, if any."""
        return self.objective.held_variables()

    def init(self, key: Array, variables: Variables | None) -> Variables:
        """Returns the initial variables of the objective."""
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
        """Runs one forward pass without dropout or gradient."""
        return score(
            self.objective,
            lax.stop_gradient(variables),
            self._own(batch),
            # The average is the student's: a teacher's own does not move.
            replace(step, ema=None),
            train=False,
            layers=layers,
            maps=maps,
            split=split,
            vocabulary=self.vocabulary,
        )[0]

    def _own(self, batch: Batch) -> Batch:
        """Returns the batch in the teacher's tokens."""
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
    """A teacher that scored the batch before the step: a cache or a live torch module.

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
        """Whether scores can be chunked: yes, stored ones are cut as they are."""
        return True

    @property
    def scores_any_tokens(self) -> bool:
        """Whether it scores sampled tokens: no, only those of the data."""
        return False

    @property
    def measures(self) -> tuple[Term, ...]:
        """The diagnostics that stored scores support, at their temperature."""
        if self.policy == "sampled":
            return ()
        kl = ForwardKL(temperature=self.temperature, t_squared=False)
        if self.temperature != 1:
            return (kl, Agreement())
        mass = () if self.top is None else (MassOnTop(k=self.top),)
        return (kl, Agreement(), *mass, EntropyGap())

    def batch_spec(self, rows: int, seq: int) -> Batch:
        """Returns shapes of its scores, of one class each, and of its hidden states."""
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
        """The names of the arrays that the policy reads."""
        if self.policy == "logits":
            return (LOGITS,)
        return (IDS, LOG_PROBS, TAIL) if self.policy == "top_k" else (IDS, WEIGHTS)

    def held_variables(self) -> None:
        """Returns no variables: scores arrive with the batch."""
        return None

    def init(self, key: Array, variables: Variables | None) -> Variables:
        """Returns no variables: scores arrive with the batch."""
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
        """Returns the scores and hidden states that the batch contains.

        Raises:
            ValueError: the batch lacks an array, or states of other layers or
                attention are requested.
        """
        needed = self._needed
        states = [hidden_name(i) for i in range(len(self.layers))]
        missing = [name for name in (*needed, *states) if name not in batch]
        unstored = [layer for layer in layers if layer not in self.layers]
        if missing or unstored or maps:
            raise ValueError(
                f"a teacher that scored before the step ({self.policy}) needs "
                f"{', '.join((*needed, *states))} in the batch and keeps no attention; "
                f"missing are {missing}; of the layers requested, {list(layers)}, it "
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
    """Returns the batch key of the states of the block at a place in `layers`."""
    return f"teacher_hidden_{place}"


def as_teacher(teacher: Objective[Any, Any] | Teacher) -> Teacher:
    """Returns an objective as a teacher in the step, and a teacher as it is.

    Raises:
        TypeError: the objective scores no tokens.
    """
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
    """Returns a teacher's logits as the arrays that `PrecomputedTeacher` reads.

    The `k` likeliest classes are kept, all where there are fewer, or `k` classes drawn
    with `key`.

    Raises:
        ValueError: classes are to be drawn, and `key` is None.
    """
    if policy == "top_k":
        kept = top_k(logits, k, temperature=temperature)
        return {IDS: kept.ids, LOG_PROBS: kept.log_probs, TAIL: kept.tail}
    if key is None:
        raise ValueError("drawing from a teacher needs a key, got None")
    drawn = draw(key, logits, k, temperature=temperature)
    return {IDS: drawn.ids, WEIGHTS: drawn.weights}
