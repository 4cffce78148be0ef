"""What a student says of a batch, in as much detail as its teachers are compared."""

from collections.abc import Sequence
from typing import Any, no_type_check

from flax import struct
from jaxtyping import Array, Float

from dew.losses.chunking import LazyLogits, MaterialisedScores
from dew.losses.scores import DenseScores
from dew.objectives.base import Aux, Objective, Step
from dew.objectives.distillation.unembedding import deferred
from dew.objectives.tokens import Splittable, with_attention
from dew.typing import Batch, Variables


@no_type_check
@struct.dataclass
class Said:
    """Scores of every position, what each counts for, and what was asked of layers."""

    scores: MaterialisedScores | LazyLogits
    weights: Float[Array, "batch seq"]
    hidden: tuple[Float[Array, "batch seq _"], ...] = ()
    maps: tuple[Float[Array, "batch _ seq seq"], ...] = ()


def read_student(
    student: Objective[Any, Any],
    variables: Variables,
    batch: Batch,
    step: Step,
    *,
    layers: Sequence[int],
    maps: Sequence[int],
    split: bool,
) -> tuple[Said, Aux[Any]]:
    """One pass in training; `split` puts the logits off to the chunks."""
    if maps:
        prediction, found = with_attention(
            student, variables, batch, step, train=True, layers=layers, maps=maps
        )
        scores = MaterialisedScores(DenseScores(prediction.logits))
        return Said(scores, prediction.weights, prediction.hidden, found), Aux()
    if split and isinstance(student, Splittable):
        states, aux = student.states(variables, batch, step, train=True, layers=layers)
        source, whole = student.splits(variables)
        scores = deferred(source.model, whole, states.final)
        return Said(scores, states.weights, states.hidden), aux
    _, aux, prediction = student.predict(
        variables, batch, step, train=True, layers=layers
    )
    scores = MaterialisedScores(DenseScores(prediction.logits))
    return Said(scores, prediction.weights, prediction.hidden), aux
