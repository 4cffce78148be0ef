"""What every objective must hold. A new one joins by a row of ROWS."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dew.losses.divergences import CrossEntropy, ForwardKL
from dew.losses.hidden_states import HiddenMSE, Relation
from dew.losses.supervised import Classification, Regression
from dew.objectives.balanced_moe import BalancedLM
from dew.objectives.barlow_twins import BarlowTwins
from dew.objectives.base import EMASpec, Objective, Step, under
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.objective import Distillation
from dew.objectives.jepa import JEPA
from dew.objectives.masked_lm import MaskedLM
from dew.objectives.seq2seq_lm import Seq2SeqLM
from dew.objectives.supervised import Supervised
from dew.tree import cast
from tests.support.masked import GARBAGE, with_garbage
from tests.support.models import (
    BALANCED,
    PAIRS,
    PATCHES,
    PIXELS,
    SEEN,
    STATES,
    TEXT,
    Encoder,
    Guesser,
    Perceptron,
    Translator,
    loaded,
    tiny_decoder,
)
from tests.support.tolerances import ACCUMULATION, HALF, RTOL, SLOPE, assert_trees_close

KEY = jax.random.key(5)


def tokens(draw: np.random.Generator) -> dict[str, Any]:
    """Four texts of unequal length; words under a false mask are noise."""
    mask = np.arange(6)[None] < np.asarray([6, 4, 1, 3])[:, None]
    return {
        "tokens": draw.integers(0, 11, (4, 6), np.int32),
        "mask": mask,
        "positions": np.arange(6, dtype=np.int32)[None] * mask,
        "segment_ids": mask.astype(np.int32),
    }


def labelled(draw: np.random.Generator) -> dict[str, Any]:
    batch = tokens(draw)
    hidden = batch["mask"] & (np.arange(6) % 2 == 0)[None]
    labels = np.random.default_rng(3).integers(0, 11, (4, 6), np.int32)
    return {**batch, "labels": np.where(hidden, labels, -100).astype(np.int32)}


def pairs(draw: np.random.Generator) -> dict[str, Any]:
    """Sources as above; targets of four, three, one and two tokens."""
    real = np.arange(4)[None] < np.asarray([4, 3, 1, 2])[:, None]
    labels = np.random.default_rng(3).integers(0, 11, (4, 4), np.int32)
    return {**tokens(draw), "labels": np.where(real, labels, -100).astype(np.int32)}


def examples(draw: np.random.Generator) -> dict[str, Any]:
    labels = np.asarray([2, 0, 1, 1], np.int32)
    pixels = draw.normal(size=(4, 5)).astype(np.float32)
    return {"pixels": pixels, "labels": labels, "loss_mask": MASK}


def targets(draw: np.random.Generator) -> dict[str, Any]:
    labels = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)
    return {**examples(draw), "labels": labels}


def views(draw: np.random.Generator) -> dict[str, Any]:
    pixels = draw.normal(size=(4, 2, 5)).astype(np.float32)
    return {"pixels": pixels, "loss_mask": np.asarray([True, False, True, True])}


def patches(draw: np.random.Generator) -> dict[str, Any]:
    seen = np.arange(6)[None] < np.asarray([6, 4, 6, 3])[:, None]
    hidden = (np.arange(6)[None] + np.arange(4)[:, None]) % 3 == 0
    x = draw.normal(size=(4, 6, 3)).astype(np.float32)
    return {"patches": x, "mask": seen, "hidden": hidden}


MASK = np.asarray([True, False, True, True])
READS = {"pixels": jax.ShapeDtypeStruct((5,), jnp.float32)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """An objective, how a batch of it is drawn, and which inputs a mask covers."""

    objective: Objective[Any, Any]
    batch: Callable[[np.random.Generator], dict[str, Any]]
    covered: str
    by: str = "mask"


def causal(**options: Any) -> CausalLM:
    return CausalLM(source=loaded(tiny_decoder(), TEXT), seq_len=6, **options)


def masked(**options: Any) -> MaskedLM:
    source = loaded(tiny_decoder(), TEXT)
    return MaskedLM(source=source, seq_len=6, vocab=11, mask_id=10, **options)


def seq2seq() -> Seq2SeqLM:
    return Seq2SeqLM(
        source=loaded(Translator(), PAIRS),
        reads={n: jax.ShapeDtypeStruct((6,), PAIRS[n].dtype) for n in (*TEXT, *SEEN)},
        target_len=4,
        start_id=1,
        pad_id=0,
    )


def balanced(**options: Any) -> BalancedLM:
    source = loaded(tiny_decoder(mlp=BALANCED), TEXT)
    return BalancedLM(lm=CausalLM(source=source, seq_len=6, **options))


def supervised(criterion: Any, **options: Any) -> Supervised:
    source = loaded(Perceptron(), PIXELS)
    return Supervised(source=source, reads=READS, criterion=criterion, **options)


def twins(**options: Any) -> BarlowTwins:
    return BarlowTwins(source=loaded(Perceptron(), PIXELS), reads=READS, **options)


def jepa() -> JEPA:
    return JEPA(
        source=loaded(Encoder(), PATCHES),
        predictor=loaded(Guesser(), STATES),
        reads={"patches": jax.ShapeDtypeStruct((6, 3), jnp.float32)},
        seq=6,
        embed=6,
        width=2,
        ema=EMASpec(optax.linear_schedule(0.996, 1.0, 100), under("params")),
    )


def distilled() -> Distillation:
    teacher = loaded(tiny_decoder(embed=12), TEXT)
    return Distillation(
        student=causal(),
        teacher=CausalLM(source=teacher, seq_len=6),
        terms=(
            ForwardKL(temperature=2.0),
            CrossEntropy(weight=0.5),
            HiddenMSE(pairs=((0, 1),), weight=0.1),
            Relation(pairs=((0, 1),), heads=2),
        ),
        measures=(),
    )


SMOOTH = Classification(smoothing=0.1, class_weights=(1.0, 2.0, 0.5))
ROWS = {
    "causal": Row(objective=causal(), batch=tokens, covered="tokens"),
    "masked": Row(objective=masked(), batch=labelled, covered="tokens"),
    "seq2seq": Row(objective=seq2seq(), batch=pairs, covered="tokens"),
    "balanced": Row(objective=balanced(), batch=tokens, covered="tokens"),
    "classification": Row(
        objective=supervised(SMOOTH), batch=examples, covered="pixels", by="loss_mask"
    ),
    "regression": Row(
        objective=supervised(Regression()),
        batch=targets,
        covered="pixels",
        by="loss_mask",
    ),
    "twins": Row(objective=twins(), batch=views, covered="pixels", by="loss_mask"),
    "distilled": Row(objective=distilled(), batch=tokens, covered="tokens"),
    "jepa": Row(objective=jepa(), batch=patches, covered="patches"),
}
every_objective = pytest.mark.parametrize("name", ROWS)


def step_of(variables: Any, key: Any = KEY) -> Step:
    """A step with an average near the weights, for objectives that need one."""
    return Step(jnp.int32(3), key, jax.tree.map(lambda leaf: leaf * 0.9, variables))


@cache
def initial(name: str) -> Any:
    return ROWS[name].objective.init(jax.random.key(1))


def batch_of(name: str, seed: int = 0) -> dict[str, Any]:
    batch = ROWS[name].batch(np.random.default_rng(seed))
    return {k: jnp.asarray(leaf) for k, leaf in batch.items()}


def value_of(name: str) -> Callable[..., Any]:
    """The reduced value of the pooled statistics of some microbatches."""
    objective, start = ROWS[name].objective, initial(name)

    def value(params: Any, batches: list[Any]) -> Any:
        tree = {**start, "params": params}
        # The average does not move with the weights, but has their dtype.
        cast_params = jax.tree.map(
            lambda s, p: s.astype(p.dtype), start["params"], params
        )
        step = step_of({**start, "params": cast_params})
        stats = [objective.loss(tree, b, step)[0] for b in batches]
        pooled = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *stats)
        return objective.reduce_loss(pooled)[0], pooled

    return value


@cache
def measure(name: str) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(value_of(name), has_aux=True))


def assert_close_for_its_size(got: Any, want: Any) -> None:
    """Differences are small beside the largest number of the tree."""
    largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(want))
    assert_trees_close(got, want, rtol=0, atol=ACCUMULATION * largest)


@every_objective
def test_a_compiled_loss_is_the_eager_one(name: str) -> None:
    params, batch = initial(name)["params"], batch_of(name)
    (compiled, _), _ = measure(name)(params, [batch])
    eager, _ = value_of(name)(params, [batch])
    assert compiled > 0
    np.testing.assert_allclose(compiled, eager, rtol=RTOL["float32"])


@every_objective
def test_what_a_mask_covers_changes_nothing(name: str) -> None:
    row, params = ROWS[name], initial(name)["params"]
    batch, noise = batch_of(name), batch_of(name, seed=1)[row.covered]
    is_real = batch[row.by].reshape(batch[row.by].shape + (1,) * 9)
    is_real = is_real.reshape(is_real.shape[: noise.ndim])
    covered = {**batch, row.covered: jnp.where(is_real, batch[row.covered], noise)}
    assert not jnp.array_equal(covered[row.covered], batch[row.covered])
    before, after = (measure(name)(params, [b]) for b in (batch, covered))
    assert_close_for_its_size(after, before)


@every_objective
@pytest.mark.parametrize("garbage", GARBAGE)
def test_no_entry_behind_a_mask_reaches_value_or_gradient(
    name: str, garbage: tuple[float, int]
) -> None:
    row, params, batch = ROWS[name], initial(name)["params"], batch_of(name)
    spoilt = with_garbage(batch, batch[row.by], *garbage)
    assert not jnp.array_equal(spoilt[row.covered], batch[row.covered])
    # Bit equal: what is masked is replaced before anything is computed from it.
    before, after = (measure(name)(params, [b]) for b in (batch, spoilt))
    assert_trees_close(after, before, rtol=0)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(after))


@every_objective
def test_microbatches_pool_to_one_large_batch(name: str) -> None:
    params, batch = initial(name)["params"], batch_of(name)
    # Three rows and one: unequal masses.
    parts = [jax.tree.map(lambda x, s=s: x[s], batch) for s in (np.s_[:3], np.s_[3:])]
    pooled, single = (measure(name)(params, b) for b in (parts, [batch]))
    assert_close_for_its_size(pooled, single)


@every_objective
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    params, batch = initial(name)["params"], batch_of(name)
    (_, _), gradient = measure(name)(params, [batch])
    norm = optax.tree.norm(gradient)
    assert norm > 0
    step = 1e-3
    ends = [
        jax.tree.map(lambda p, g, s=s: p + s * g / norm, params, gradient)
        for s in (step, -step)
    ]
    up, down = (float(measure(name)(end, [batch])[0][0]) for end in ends)
    np.testing.assert_allclose((up - down) / (2 * step), norm, rtol=SLOPE)


@every_objective
def test_half_precision_stays_finite_and_sums_in_float32(name: str) -> None:
    params = initial(name)["params"]
    batch = batch_of(name)
    (full, _), _ = measure(name)(params, [batch])
    params, batch = (cast(tree, jnp.bfloat16) for tree in (params, batch))
    (value, stats), gradient = measure(name)(params, [batch])
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {jnp.dtype("float32")}
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(gradient))
    np.testing.assert_allclose(value, full, rtol=HALF)
