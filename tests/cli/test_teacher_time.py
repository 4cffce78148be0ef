"""What a distillation logs beside its terms."""

import math

import pytest

from dew.cli.teacher_time import Watch, seconds_a_token, waited
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.teachers import ModelTeacher
from dew.training.logs import Log
from tests.support.models import TEXT, loaded, tiny_decoder


def log(**nats: float) -> Log:
    named = {f"watch/{name}": value for name, value in nats.items()}
    return Log(step=1, commits=(), metrics=named, seconds=2.0, tokens=12)


def test_a_log_tells_perplexities_and_the_teachers_share_of_the_time() -> None:
    watch = Watch(teacher_seconds=lambda log: 0.05 * log.tokens)
    nats = {"cross_entropy": math.log(7), "teacher_cross_entropy": math.log(3)}
    assert watch(log(**nats)) == pytest.approx(
        {"student_perplexity": 7, "teacher_perplexity": 3, "teacher_share": 0.3}
    )
    assert watch.last["teacher_share"] == pytest.approx(0.3)
    assert Watch()(log()) == {}


def test_a_teacher_is_timed_alone_on_batches_of_the_runs_shape() -> None:
    teacher = ModelTeacher(
        objective=CausalLM(source=loaded(tiny_decoder(), TEXT), seq_len=6)
    )
    assert 0 < seconds_a_token(teacher, rows=2, seq_len=6) < 1


def test_a_live_teachers_time_is_what_each_interval_waited_for() -> None:
    totals = iter((1.0, 1.5, 3.5))
    since = waited(lambda: next(totals))
    assert [since(log()), since(log())] == [0.5, 2.0]
