"""Rows that the student writes: which, from what prompt, and what of them counts."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dew.losses.divergences import ForwardKL
from dew.objectives.base import Step, scalar_loss
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.objective import Distillation
from dew.objectives.distillation.on_policy import OnPolicy
from dew.objectives.distillation.teachers import PrecomputedTeacher
from dew.objectives.tokens import next_token_weights
from dew.training.checkpoint import Checkpoints
from dew.training.trainer import Trainer
from dew.tree import flatten
from tests.losses import reference as ref
from tests.support.models import TEXT, loaded, tiny_decoder
from tests.support.tolerances import ATOL, RTOL

ENDS = (1, 4)
ALWAYS = OnPolicy(rate=1.0, new_tokens=3)


@cache
def student() -> CausalLM:
    source = replace(loaded(tiny_decoder(), TEXT), eos_ids=ENDS)
    return CausalLM(source=source, seq_len=6)


@cache
def teacher() -> CausalLM:
    return CausalLM(source=loaded(tiny_decoder(embed=12), TEXT), seq_len=6)


def batch(rows: int = 8) -> dict[str, Any]:
    """Rows of two documents and, in the last, nothing but padding."""
    tokens = np.random.default_rng(0).integers(3, 11, (rows, 6), np.int32)
    segments = np.tile(np.asarray([1, 2, 2, 2, 2, 2], np.int32), (rows, 1))
    segments[-1] = 0
    positions = np.tile(np.asarray([0, 0, 1, 2, 3, 4], np.int32), (rows, 1))
    arrays = {"tokens": tokens, "segment_ids": segments, "positions": positions}
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def step(key: int = 0) -> Step:
    return Step(jnp.int32(0), jax.random.key(key))


def mixed(on_policy: OnPolicy, inputs: Any, key: int = 0) -> tuple[Any, Any]:
    source = student().source
    run = jax.jit(lambda v, b, s: on_policy.sample_rows(source, v, b, s))
    return jax.device_get(run(source.variables, inputs, step(key)))


def test_a_rate_of_0_is_the_data_and_nothing_else() -> None:
    x = batch()
    same, reports = OnPolicy(rate=0.0, new_tokens=3).sample_rows(
        student().source, {}, x, step()
    )
    assert same is x
    assert reports == {}
    values = [
        scalar_loss(made, made.init(step().key), x, step())[0]
        for made in (
            distillation(None),
            distillation(OnPolicy(rate=0.0, new_tokens=3)),
        )
    ]
    assert values[0] == values[1]


def distillation(on_policy: OnPolicy | None, **options: Any) -> Distillation:
    return Distillation(
        student=student(), teacher=teacher(), on_policy=on_policy, **options
    )


def test_a_rate_of_1_continues_every_document_that_a_row_ends_its_prompt_in() -> None:
    x = batch()
    got, reports = mixed(ALWAYS, x)
    # Token 0 is another document; the prompt is tokens 1 and 2, moved to the left.
    np.testing.assert_array_equal(got["tokens"][:-1, :2], x["tokens"][:-1, 1:3])
    for i, row in enumerate(got["tokens"][:-1]):
        new = row[2:5].tolist()
        length = min([i + 1 for i, token in enumerate(new) if token in ENDS] + [3])
        counted = np.arange(6) < 2 + length
        np.testing.assert_array_equal(got["segment_ids"][i], counted)
        np.testing.assert_array_equal(got["loss_mask"][i], counted & (np.arange(6) > 1))
        np.testing.assert_array_equal(got["positions"][i], np.arange(6) * counted)
    assert reports["on_policy/rows"].total == 7
    assert np.isin(got["tokens"][:-1, 2:4], ENDS).any(), "no row ended early"
    np.testing.assert_array_equal(got["segment_ids"][-1], 0)


def test_only_completions_count_in_the_loss() -> None:
    """Against float64 numpy over the rows as they were sampled."""
    x = batch()
    made = distillation(ALWAYS, measures=(), chunk=None)
    variables = made.init(step().key)
    found, aux = jax.jit(lambda v, b: scalar_loss(made, v, b, step()))(variables, x)
    rows = jax.tree.map(jnp.asarray, mixed(ALWAYS, x)[0])
    live = np.asarray(next_token_weights(rows)) > 0
    sides = []
    for one in (teacher(), student()):
        own = one.init(step().key)
        said = one.predict(own, rows, step(), train=False)[2].logits
        sides.append(np.asarray(said, np.float64)[live])
    assert float(aux.metrics["forward_kl"].mass) == live.sum()
    assert live.sum() == float(aux.metrics["on_policy/new_tokens"].total)
    want = ref.forward_kl(*sides).mean()
    np.testing.assert_allclose(found, want, rtol=RTOL["float32"])


def test_a_prompt_ends_where_the_completion_of_the_data_starts() -> None:
    x = batch(2)
    del x["segment_ids"], x["positions"]
    x["loss_mask"] = jnp.asarray([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]], bool)
    got, _ = mixed(ALWAYS, x)
    for i, prompt in enumerate((2, 1)):
        want = x["tokens"][i, :prompt]
        np.testing.assert_array_equal(got["tokens"][i, :prompt], want)
        assert not got["loss_mask"][i, :prompt].any()
        assert got["loss_mask"][i, prompt]


def test_coins_and_samples_follow_from_the_key() -> None:
    half, x = OnPolicy(rate=0.5, new_tokens=3), batch(64)
    first, again, other = (mixed(half, x, key)[0]["tokens"] for key in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    kept = (first == np.asarray(x["tokens"])).all(axis=1)
    # 63 fair coins: below 16 or above 47 heads once in 30,000 keys.
    assert 16 <= kept[:-1].sum() <= 47


@pytest.mark.full
def test_samples_are_drawn_from_the_students_own_distribution() -> None:
    x = {"tokens": jnp.tile(batch(1)["tokens"], (4000, 1))}
    got = mixed(OnPolicy(rate=1.0, new_tokens=2), x)[0]["tokens"][:, 4]
    own = student().init(step().key)
    row = {"tokens": x["tokens"][:1]}
    said = student().predict(own, row, step(), train=False)[2].logits[0, 3]
    want = np.exp(ref.log_softmax(np.asarray(said, np.float64)))
    share = np.bincount(got, minlength=11) / 4000
    # A standard error of at most 0.008.
    np.testing.assert_allclose(share, want, atol=ATOL["drawn"])


class Stream:
    """Batches that say where they stand."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> dict[str, Any]:
        self.at += 1
        return batch(4)

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at}

    def set_state(self, state: Any) -> None:
        self.at = state["at"]


@pytest.mark.full
def test_a_resumed_run_samples_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    def run(folder: str, *stops: int) -> Any:
        state: Any = None
        for stop in stops:
            saved = Checkpoints(tmp_path / folder, every=1)
            made = distillation(OnPolicy(rate=0.5, new_tokens=3), measures=())
            trainer = Trainer(
                made, optax.sgd(0.5), key=jax.random.key(3), checkpoints=saved
            )
            state = trainer.fit(Stream(), steps=stop, resume=True)
        return flatten(state.variables["params"])

    once, twice = run("once", 4), run("twice", 2, 4)
    for path, leaf in once.items():
        np.testing.assert_array_equal(leaf, twice[path])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OnPolicy(rate=1.5, new_tokens=3), r"rate must be in \[0, 1\]"),
        (lambda: OnPolicy(rate=0.5, new_tokens=0), "new_tokens must be at least 1"),
        (
            lambda: Distillation(
                student=student(),
                teacher=PrecomputedTeacher(),
                terms=(ForwardKL(),),
                on_policy=ALWAYS,
            ),
            "have scored the data, not what the student writes",
        ),
        (
            lambda: OnPolicy(rate=0.5, new_tokens=6).sample_rows(
                student().source, {}, batch(), step()
            ),
            "must leave room for a prompt in rows of 6",
        ),
    ],
)
def test_what_cannot_be_sampled_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
