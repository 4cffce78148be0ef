"""What an evaluation returns against what is declared, and previews without metrics."""

from collections.abc import Sequence
from typing import Any

import jax
import optax
import pytest

from dew.objectives.base import Step
from dew.objectives.metrics import token_metrics
from dew.objectives.tokens import TokenScores
from dew.training.callbacks import Callback
from dew.training.evaluation import Evaluation, run_evaluation
from dew.training.trainer import Trainer
from tests.support.objectives import Toy, microbatch

KEY = jax.random.key(0)


def returning(declared: Any, made: Any) -> Toy:
    """An objective that declares one type and evaluates to a given object."""

    class Declaring(Toy):
        artifact = declared

        def evaluate(self, params: Any, batch: Any, step: Step) -> Any:
            return made

    return Declaring()


class Pictures(Toy):
    """Evaluates nothing, and shows how many rows the first batch has."""

    def preview(
        self, params: Any, batch: Any, step: Step, *, scored: Any = None
    ) -> str:
        return f"{len(batch['x'])} rows"


class Shown(Callback):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.previews: list[tuple[int, str, object]] = []

    def on_preview(self, step: int, name: str, preview: object) -> None:
        self.previews.append((step, name, preview))


def evaluate(objective: Toy, previews: list[object], **options: Any) -> Any:
    batches = [microbatch(0), microbatch(1, (1, 1))]
    return run_evaluation(
        objective,
        objective.init(KEY),
        Evaluation(batches=lambda: batches, **options),
        key=KEY,
        preview=previews.append,
    )


SCORES = TokenScores(jax.numpy.ones((2, 3)), jax.numpy.ones((2, 3)))


@pytest.mark.parametrize(
    ("declared", "made", "message"),
    [
        (TokenScores, None, "evaluate returned None.*artifact is TokenScores"),
        (TokenScores, "text", "evaluate returned a str.*artifact is TokenScores"),
        (None, SCORES, "evaluate returned a TokenScores.*artifact is None"),
    ],
)
def test_another_artifact_than_declared_is_refused(
    declared: Any, made: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=f"Declaring.{message}"):
        evaluate(returning(declared, made), [])


@pytest.mark.parametrize("objective", [Toy(), returning(str, "text"), Pictures()])
def test_a_preview_needs_no_metrics(objective: Toy) -> None:
    previews: list[object] = []
    assert evaluate(objective, previews) == {}
    shown = {Toy: None, Pictures: "4 rows"}.get(type(objective), "text")
    assert previews == [shown]


def test_a_metric_of_an_objective_that_evaluates_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="Pictures evaluates to nothing, but perplex"):
        evaluate(Pictures(), [], metrics=token_metrics())


def test_an_empty_set_is_refused_with_and_without_metrics() -> None:
    for metrics in ({}, token_metrics()):
        empty = Evaluation(batches=list[Any], metrics=metrics)
        objective = returning(TokenScores, SCORES)
        with pytest.raises(ValueError, match="validation set is empty"):
            run_evaluation(objective, objective.init(KEY), empty, key=KEY)


@pytest.mark.parametrize(
    ("objective", "previews"),
    [(Pictures(), [(1, "shown", "4 rows"), (2, "shown", "4 rows")]), (Toy(), [])],
)
def test_a_run_shows_previews_without_metrics(
    objective: Toy, previews: Sequence[Any]
) -> None:
    shown = Shown()
    trainer = Trainer(objective, optax.sgd(0.1), key=KEY, callbacks=[shown])
    data = iter([microbatch(1), microbatch(2)])
    sets = {"shown": Evaluation(batches=lambda: [microbatch(0)])}
    trainer.fit(data, steps=2, evaluations=sets, eval_every=1)
    assert shown.previews == previews
