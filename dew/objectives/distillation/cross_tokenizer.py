"""A teacher with a tokenizer of its own, for the ULD loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
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
from dew.objectives.distillation.sides import objective_faults
from dew.objectives.tokens import real_tokens
from dew.typing import Batch, Variables


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossTokenizerTeacher:
    """A teacher that runs in the step on the text in tokens of its own.

    Only ULD and the student's own terms are possible. Batches contain the teacher's
    tokens and the alignment of both tokenizations:
    `dew.data.retokenize.Retokenized` adds them to any stream of token batches.

    Raises:
        TypeError: what is given is no objective, or one that scores no tokens.
    """

    objective: Objective[Any, Any]
    weight: Schedule = 1.0

    def __post_init__(self) -> None:
        faults = objective_faults("CrossTokenizerTeacher.objective", self.objective)
        if faults:
            raise TypeError("; ".join(faults))

    @property
    def scores_type(self) -> type[Scores]:
        """The form of its scores: a distribution over classes of its own."""
        return SpanScores

    @property
    def supports_chunking(self) -> bool:
        """Whether scores can be chunked: no, a span may cross chunks."""
        return False

    @property
    def scores_any_tokens(self) -> bool:
        """Whether it scores sampled tokens: no, retokenization precedes the step."""
        return False

    @property
    def measures(self) -> tuple[Term, ...]:
        """The diagnostics: none, as the classes of two tokenizers differ."""
        return ()

    def batch_spec(self, rows: int, seq: int) -> Batch:
        """Returns the arrays for hidden states: none, they have other positions."""
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
        """Runs one forward pass over the teacher's tokens.

        Raises:
            ValueError: the batch lacks them, or hidden states are requested.
        """
        missing = [name for name in RESPELLED if name not in batch]
        if missing or layers or maps:
            raise ValueError(
                "a teacher across tokenizers needs batches that Retokenized made, and "
                "its states have other positions than the student's; missing are "
                f"{missing}, layers requested are {[*layers, *maps]}"
            )
        # The teacher's row is longer or shorter than the student's: positions and
        # documents of its own, and spans that pair the two.
        segments = batch["respelled_segments"]
        tokens = jnp.where(segments != 0, batch["respelled_tokens"], 0)
        own = {
            "tokens": tokens,
            "positions": batch["respelled_positions"],
            "segment_ids": segments,
        }
        held = lax.stop_gradient(variables)
        # The average is the student's: a teacher's own does not move.
        step = replace(step, ema=None)
        prediction = self.objective.predict(held, own, step, train=False)[2]
        real = real_tokens(batch)
        spans = Spans(
            starts=batch["span_starts"].astype(bool) & real,
            teacher_at=jnp.where(real, batch["span_teacher_at"], 0),
            student_span=jnp.where(real, batch["span_of_student"], -1),
            teacher_span=jnp.where(segments != 0, batch["span_of_teacher"], -1),
        )
        scores = SpanScores(prediction.logits, next_tokens(tokens), spans)
        return Scored(
            CrossTokenizerScores(lax.stop_gradient(scores)), prediction.weights
        )
