"""Chunked losses against dense ones: values, gradients of everything, and memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.losses.chunking import (
    LazyLogits,
    MaterialisedScores,
    sequence_weights,
    sum_over_chunks,
    term_sums,
)
from dew.losses.divergences import (
    TVD,
    CrossEntropy,
    ForwardKL,
    ReverseKL,
    ScaledJSD,
    SkewKL,
    SoftCrossEntropy,
    TopKTail,
)
from dew.losses.scores import DenseScores
from dew.losses.sparse_scores import draw, top_k
from dew.losses.uld import ULD
from tests.support.tolerances import ATOL, RTOL

BATCH, SEQ, EMBED, VOCAB = 2, 7, 8, 40
TERMS = (
    CrossEntropy(),
    ForwardKL(temperature=2.0),
    ReverseKL(),
    ScaledJSD(beta=0.3),
    SkewKL(),
    TVD(),
    TopKTail(k=5),
    ULD(),
)


def inputs(dtype: Any = jnp.float32) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, dtype)
    return {
        "hidden": normal(BATCH, SEQ, EMBED),
        "head": {"kernel": normal(EMBED, VOCAB), "bias": normal(VOCAB)},
        "teacher_hidden": normal(BATCH, SEQ, 2 * EMBED),
        "teacher_head": {"kernel": normal(2 * EMBED, VOCAB), "bias": normal(VOCAB)},
        "labels": jax.random.randint(next(keys), (BATCH, SEQ), 0, VOCAB),
        "weights": jax.random.uniform(next(keys), (BATCH, SEQ)).at[1, 4:].set(0),
    }


def unembed(head: Any, hidden: Any) -> Any:
    """A head with what real ones have: a bias and a softcap."""
    return 5 * jnp.tanh((hidden @ head["kernel"] + head["bias"][None, None]) / 5)


@partial(jax.jit, static_argnums=(1, 2))
def sums(x: Any, terms: Any, chunk: int | None) -> Any:
    return term_sums(
        terms,
        LazyLogits(x["head"], x["hidden"], unembed),
        LazyLogits(x["teacher_head"], x["teacher_hidden"], unembed),
        weights=x["weights"],
        labels=x["labels"],
        chunk=chunk,
    )


@partial(jax.jit, static_argnums=1)
def graded(x: Any, chunk: int | None) -> Any:
    """Every sum, and the gradient of them mixed by unequal weights."""

    def total(moving: Any) -> Any:
        found = sums({**x, **moving}, TERMS, chunk)
        return sum((i + 1) * one for i, one in enumerate(found)), found

    moving = {k: x[k] for k in ("hidden", "head", "teacher_hidden", "teacher_head")}
    return jax.grad(total, has_aux=True)(moving)


@pytest.fixture(scope="module")
def dense() -> Any:
    return graded(inputs(), None)


# Of 7 positions: seven chunks, and three of which the last is ragged. One is dense.
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.full), 3])
def test_any_chunk_gives_the_dense_sums_and_gradients(chunk: int, dense: Any) -> None:
    slopes, found = graded(inputs(), chunk)
    for term, got, want in zip(TERMS, found, dense[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=RTOL["chunked"], err_msg=str(term))
    for name in ("hidden", "head"):
        close = partial(np.testing.assert_allclose, rtol=0, atol=ATOL["chunked"])
        jax.tree.map(close, slopes[name], dense[0][name])


def test_neither_teacher_hidden_states_nor_head_get_a_gradient(dense: Any) -> None:
    slopes, _ = graded(inputs(), 3)
    for slope in (slopes, dense[0]):
        for name in ("teacher_hidden", "teacher_head"):
            assert not any(
                np.asarray(leaf).any() for leaf in jax.tree.leaves(slope[name])
            )


def test_a_masked_position_may_hold_anything_when_chunked(dense: Any) -> None:
    x = inputs()
    dirty = jnp.where(x["weights"][..., None] > 0, 0, jnp.nan)
    x["hidden"], x["teacher_hidden"] = x["hidden"] + dirty, x["teacher_hidden"] + dirty
    x["labels"] = jnp.where(x["weights"] > 0, x["labels"], -100)
    slopes, found = graded(x, 3)
    np.testing.assert_allclose(found, dense[1], rtol=RTOL["chunked"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_sparse_and_drawn_teachers_chunk_as_whole_ones_do() -> None:
    x = inputs()
    logits = unembed(x["teacher_head"], x["teacher_hidden"])
    drawn = draw(jax.random.key(1), logits, 6)

    @partial(jax.jit, static_argnums=2)
    def total(x: Any, scores: Any, chunk: int | None) -> Any:
        student, weights = LazyLogits(x["head"], x["hidden"], unembed), x["weights"]
        terms = (SoftCrossEntropy(),)
        return term_sums(
            terms, student, MaterialisedScores(scores), weights=weights, chunk=chunk
        )

    for scores in (DenseScores(logits), top_k(logits, 5), drawn):
        one, other = (total(x, scores, chunk) for chunk in (None, 3))
        np.testing.assert_allclose(one, other, rtol=RTOL["chunked"])


def test_a_bfloat16_head_gets_its_gradient_summed_in_float32() -> None:
    x = inputs()
    head = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), x["head"])
    tiny = jnp.full((1, 4096, EMBED), 2.0**-12, jnp.bfloat16)

    def total(head: Any) -> Any:
        # One large summand, then many that each vanish beside it in bfloat16.
        fn = lambda head, part: jnp.sum(part @ head["kernel"], dtype=jnp.float32)
        return sum_over_chunks(fn, head, tiny.at[0, 0].set(1.0), chunk=1)

    got = jax.jit(jax.grad(total))(head)["kernel"]
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        got.astype(jnp.float32), 1 + 4095 * 2.0**-12, rtol=RTOL["bfloat16"]
    )


def test_chunking_never_holds_the_logits_of_the_batch() -> None:
    terms = (ForwardKL(), CrossEntropy())
    batch, seq, embed, vocab = 2, 256, 16, 4096
    spec = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    head = {"kernel": spec(embed, vocab), "bias": spec(vocab)}
    hidden = spec(batch, seq, embed)
    x = {
        "hidden": hidden,
        "head": head,
        "teacher_hidden": hidden,
        "teacher_head": head,
        "labels": spec(batch, seq, dtype=jnp.int32),
        "weights": spec(batch, seq),
    }

    def peak(chunk: int | None) -> int:
        total = lambda moving, x: sum(sums({**x, **moving}, terms, chunk))
        moving = {"hidden": hidden, "head": head}
        compiled = jax.jit(jax.grad(total)).lower(moving, x).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    # One side's logits are 8 MiB; seen are 64 MiB dense, 4.1 at 16 positions a time.
    logits = batch * seq * vocab * 4
    dense, chunked = peak(None), peak(16)
    assert dense >= 2 * logits
    assert chunked < logits


def test_sequence_weights_turn_a_token_sum_into_a_sum_of_sequence_means() -> None:
    values = jnp.asarray([[5.0, 5.0, 5.0], [1.0, 7.0, 9.0], [8.0, 8.0, 8.0]])
    weights = jnp.asarray([[1.0, 1.0, 1.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    got = jnp.sum(sequence_weights(weights) * values, axis=1)
    np.testing.assert_allclose(got, [5.0, 1.0, 0.0], rtol=RTOL["float32"])


def test_a_chunk_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk must be at least 1 position, got 0"):
        sum_over_chunks(lambda held, part: part.sum(), (), jnp.ones((1, 3)), chunk=0)
