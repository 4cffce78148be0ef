"""Hidden-state, relation and attention losses against numpy and their invariances."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.losses.hidden_states import (
    AttentionMap,
    HiddenCosine,
    HiddenMSE,
    Relation,
    even_layers,
    projector,
    visible_pairs,
)
from dew.losses.term import StateInputs
from tests.support.tolerances import ATOL, RTOL

PAIRS = ((0, 1), (1, 3))


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def states(width: int, seed: int = 0, seq: int = 5) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(2, seq, width))) for _ in PAIRS]


def mask(seq: int = 5, real: int = 5) -> Any:
    return jnp.asarray(np.broadcast_to(np.arange(seq) < real, (2, seq)))


def test_the_hidden_mse_averages_over_features_and_pairs() -> None:
    ours, theirs = states(6, 1), states(6, 2)
    got = HiddenMSE(pairs=PAIRS).values(StateInputs(ours, theirs))
    want = [
        ((np.asarray(x) - np.asarray(y)) ** 2).mean(-1)
        for x, y in zip(ours, theirs, strict=True)
    ]
    np.testing.assert_allclose(got, np.mean(want, axis=0), rtol=RTOL["float64"])


def test_the_hidden_mse_does_not_grow_with_the_width() -> None:
    ours, theirs = states(6, 1), states(6, 2)
    twice = [[jnp.concatenate([x, x], -1) for x in side] for side in (ours, theirs)]
    term = HiddenMSE(pairs=PAIRS)
    np.testing.assert_allclose(
        term.values(StateInputs(*twice)),
        term.values(StateInputs(ours, theirs)),
        rtol=RTOL["float64"],
    )


def test_a_projector_maps_the_student_alone_and_gets_the_gradient() -> None:
    ours, theirs = states(4, 1), states(6, 2)
    keys = jax.random.split(jax.random.key(0), 2)
    maps = [projector(key, 4, 6) for key in keys]
    total = lambda x, y, w: (
        HiddenMSE(pairs=PAIRS).values(StateInputs(x, y, projectors=w)).sum()
    )
    for_ours, for_theirs, for_maps = jax.grad(total, argnums=(0, 1, 2))(
        ours, theirs, maps
    )
    assert all(np.asarray(g).any() for g in (*for_ours, *for_maps))
    assert not any(np.asarray(g).any() for g in for_theirs)


def test_the_cosine_is_one_less_the_angles_cosine_and_blind_to_size() -> None:
    ours, theirs = states(6, 1), states(6, 2)
    got = HiddenCosine(pairs=PAIRS).values(StateInputs(ours, theirs))
    cosines = []
    for x, y in zip(map(np.asarray, ours), map(np.asarray, theirs), strict=True):
        norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
        cosines.append((x * y).sum(-1) / norms)
    np.testing.assert_allclose(got, 1 - np.mean(cosines, axis=0), rtol=RTOL["float64"])
    scaled = [3 * x for x in ours], [0.1 * y for y in theirs]
    again = HiddenCosine(pairs=PAIRS).values(StateInputs(*scaled))
    np.testing.assert_allclose(again, got, rtol=RTOL["float64"])


def test_a_state_of_zeros_has_a_finite_cosine_and_gradient() -> None:
    zeros, theirs = [jnp.zeros((2, 5, 6))] * 2, states(6)
    total = lambda x: HiddenCosine(pairs=PAIRS).values(StateInputs(x, theirs)).sum()
    value, slope = jax.value_and_grad(total)(zeros)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in slope)


def relation_in_numpy(x: np.ndarray, y: np.ndarray, heads: int) -> np.ndarray:
    def rows(x: np.ndarray) -> np.ndarray:
        split = x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)
        scores = split @ split.swapaxes(-1, -2) / np.sqrt(split.shape[-1])
        return np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)

    p, q = rows(y), rows(x)
    return (p * np.log(p / q)).sum(-1).mean(1)


def test_the_relation_is_the_kl_of_rows_whatever_the_widths() -> None:
    ours, theirs = states(8, 1), states(12, 2)
    got = Relation(pairs=PAIRS, heads=4).values(
        StateInputs(ours, theirs, visible=visible_pairs(mask()))
    )
    want = [
        relation_in_numpy(np.asarray(x), np.asarray(y), 4)
        for x, y in zip(ours, theirs, strict=True)
    ]
    np.testing.assert_allclose(got, np.mean(want, axis=0), rtol=RTOL["float64"])


@pytest.mark.parametrize("name", ["relation", "attention"])
def test_padding_neither_rows_nor_columns_changes_a_map_loss(name: str) -> None:
    term: Any = Relation(pairs=PAIRS, heads=2)
    sides = [states(8, 1), states(8, 2)]
    short = [[x[:, :3] for x in side] for side in sides]
    if name == "attention":
        term = AttentionMap(pairs=PAIRS)
        as_maps = lambda side: [jnp.einsum("bqd,bkd->bqk", x, x)[:, None] for x in side]
        sides, short = [as_maps(s) for s in sides], [as_maps(s) for s in short]
    padded = term.values(StateInputs(*sides, visible=visible_pairs(mask(5, 3))))
    want = term.values(StateInputs(*short, visible=visible_pairs(mask(3, 3))))
    np.testing.assert_allclose(padded[:, :3], want, rtol=RTOL["float64"])
    assert not np.asarray(padded[:, 3:]).any()


def test_packed_documents_relate_as_they_do_alone() -> None:
    ours, theirs = states(8, 1), states(8, 2)
    segments = jnp.asarray([[1, 1, 2, 2, 2]] * 2)
    term = Relation(pairs=PAIRS, heads=2)
    packed = term.values(
        StateInputs(ours, theirs, visible=visible_pairs(mask(), segments, causal=True))
    )
    for part in (slice(0, 2), slice(2, 5)):
        cut = [[x[:, part] for x in side] for side in (ours, theirs)]
        length = cut[0][0].shape[1]
        alone = term.values(
            StateInputs(
                cut[0], cut[1], visible=visible_pairs(mask(length, length), causal=True)
            )
        )
        np.testing.assert_allclose(packed[:, part], alone, rtol=RTOL["float64"])


def test_a_model_matched_with_itself_has_no_feature_loss() -> None:
    same = states(8)
    seen = visible_pairs(mask(5, 4))
    maps = [jnp.ones((2, 2, 5, 5))] * 2
    for value in (
        HiddenMSE(pairs=PAIRS).values(StateInputs(same, same)),
        HiddenCosine(pairs=PAIRS).values(StateInputs(same, same)),
        Relation(pairs=PAIRS, heads=2).values(StateInputs(same, same, visible=seen)),
        AttentionMap(pairs=PAIRS).values(StateInputs(maps, maps, visible=seen)),
    ):
        assert float(jnp.abs(value).max()) <= ATOL["self float64"]


@pytest.mark.parametrize(
    ("student", "teacher", "want"),
    [
        (3, 6, ((0, 1), (1, 3), (2, 5))),
        (2, 5, ((0, 2), (1, 4))),
        (4, 6, ((0, 1), (1, 2), (2, 4), (3, 5))),
        (3, 3, ((0, 0), (1, 1), (2, 2))),
    ],
)
def test_even_layers_pair_the_last_blocks(
    student: int, teacher: int, want: Any
) -> None:
    assert even_layers(student, teacher) == want


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: HiddenMSE(pairs=PAIRS).values(StateInputs(states(4), states(6))),
            r"give a projector for the layer pairs \(0, 1\): 4 and 6",
        ),
        (
            lambda: HiddenMSE(pairs=PAIRS).values(
                StateInputs(states(4)[:1], states(4))
            ),
            "2 layer pairs need as many states of each side, got 1 of the student",
        ),
        (
            lambda: Relation(pairs=PAIRS, heads=3).values(
                StateInputs(states(8), states(8), visible=visible_pairs(mask()))
            ),
            "must divide both widths, got 3 heads for a width of 8",
        ),
        (
            lambda: AttentionMap(pairs=PAIRS).values(
                StateInputs(
                    [jnp.ones((2, 2, 5, 5))] * 2,
                    [jnp.ones((2, 4, 5, 5))] * 2,
                    visible=visible_pairs(mask()),
                )
            ),
            "attention maps of 2 and 4 heads do not pair",
        ),
        (lambda: even_layers(6, 3), "1 <= student <= teacher blocks, got 6, 3"),
    ],
)
def test_features_that_do_not_pair_are_refused(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()
