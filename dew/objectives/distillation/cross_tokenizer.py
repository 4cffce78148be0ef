"""A teacher with a tokenizer of its own, for ULD."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jaxtyping import Array

from dew.data.retokenize import RESPELLED
from dew.losses.chunking import CrossTokenizerScores
from dew.losses.cross_entropy import next_tokens
from dew.losses.scores import Scores
from dew.losses.term import Schedule, Term
from dew.losses.uld import Spans, SpanScores
from dew.objectives.base import Objective, Step
from dew.objectives.distillation.scoring import Scored
from dew.typing import Batch, Variables


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossTokenizerTeacher:
    """A teacher that runs in the step and reads the text in tokens of its own.

    Only ULD and the student's own terms can be learned from it. Batches hold the
    teacher's tokens and how both cuts of the text align: see
    `dew.data.retokenize.Retokenized`, which adds them to any stream of token batches.
    """

    objective: Objective[Any, Any]
    weight: Schedule = 1.0

    @property
    def scores_type(self) -> type[Scores]:
        """The form of its scores: a distribution over classes of its own."""
        return SpanScores

    @property
    def supports_chunking(self) -> bool:
        """A span may cross from one chunk into the next."""
        return False

    @property
    def scores_any_tokens(self) -> bool:
        """It runs there, on tokens that were made before."""
        return False

    @property
    def measures(self) -> tuple[Term, ...]:
        """The classes of two tokenizers cannot be compared."""
        return ()

    def batch_spec(self, rows: int, seq: int) -> Batch:
        """Nothing that states could be made of."""
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
        """One forward over the teacher's tokens.

        Raises:
            ValueError: the batch has none, or states are asked for.
        """
        missing = [name for name in RESPELLED if name not in batch]
        if missing or layers or maps:
            raise ValueError(
                "a teacher across tokenizers needs batches that Retokenized made, and "
                "its states stand at other positions than the student's; missing are "
                f"{missing}, layers asked for are {[*layers, *maps]}"
            )
        tokens = batch["respelled_tokens"]
        own = {
            "tokens": tokens,
            "positions": batch["respelled_positions"],
            "segment_ids": batch["respelled_segments"],
        }
        held = lax.stop_gradient(variables)
        prediction = self.objective.predict(held, own, step, train=False)[2]
        spans = Spans(
            starts=batch["span_starts"].astype(bool),
            teacher_at=batch["span_teacher_at"],
            student_span=batch["span_of_student"],
            teacher_span=batch["span_of_teacher"],
        )
        scores = SpanScores(prediction.logits, next_tokens(tokens), spans)
        return Scored(
            CrossTokenizerScores(lax.stop_gradient(scores)), prediction.weights
        )
