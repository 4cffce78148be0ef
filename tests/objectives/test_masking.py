"""What is put in the place of masked entries, and where nothing may be put."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.losses.supervised import Classification
from dew.objectives.base import Step
from dew.objectives.masked_lm import MaskedLM
from dew.objectives.masking import padding_id, without_masked, without_uncounted
from dew.objectives.supervised import Supervised
from dew.source import Source
from tests.support.models import PIXELS, TEXT, Perceptron, loaded, tiny_decoder
from tests.support.tolerances import assert_trees_close

MASK = jnp.asarray([[True, True, False], [True, False, False]])


def test_a_mask_covers_what_has_its_axes_first_or_around_the_features() -> None:
    inputs = {
        "tokens": jnp.asarray([[1, 2, -100], [4, 2**31 - 1, 6]]),
        "inputs_embeds": jnp.full((2, 3, 2), jnp.nan),
        "input_features": jnp.full((2, 5, 3), jnp.nan),
        "decoder_input_ids": jnp.full((2, 3), 9),
        "labels_of_rows": jnp.asarray([7, 8]),
        "mask": MASK,
    }
    clean = without_masked(inputs, pad_id=5)
    np.testing.assert_array_equal(clean["tokens"], [[1, 2, 5], [4, 5, 5]])
    for name, real in (
        ("inputs_embeds", MASK[:, :, None]),
        ("input_features", MASK[:, None]),
    ):
        np.testing.assert_array_equal(jnp.isnan(clean[name]).all(where=real), True)
        np.testing.assert_array_equal(jnp.where(real, 0, clean[name]), 0)
    for name in ("decoder_input_ids", "labels_of_rows", "mask"):
        assert clean[name] is inputs[name]


def test_pixels_have_a_mask_of_their_own_and_segments_mask_too() -> None:
    pixels = jnp.full((2, 3, 4, 4), jnp.nan)
    area = jnp.zeros((2, 4, 4), bool)
    inputs = {"pixel_values": pixels, "pixel_mask": area, "mask": MASK}
    np.testing.assert_array_equal(without_masked(inputs)["pixel_values"], 0)
    assert (
        without_masked({"pixel_values": pixels, "mask": MASK})["pixel_values"] is pixels
    )
    segments = {
        "tokens": jnp.full((2, 3), -1),
        "segment_ids": jnp.asarray([[1, 0, 2]] * 2),
    }
    np.testing.assert_array_equal(without_masked(segments)["tokens"], [[-1, 0, -1]] * 2)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (None, 0),
        ({"pad_token_id": None}, 0),
        ({"pad_token_id": 1, "vocab_size": 8}, 1),
        ({"pad_token_id": 1}, 1),
        ({"pad_token_id": 8, "vocab_size": 8}, 0),
        ({"pad_token_id": -1, "vocab_size": 8}, 0),
        ({"pad_token_id": 3, "text_config": {"vocab_size": 8}}, 3),
    ],
)
def test_padding_is_the_models_own_where_it_is_valid(config: Any, want: int) -> None:
    assert padding_id(Source(model=Perceptron(), config=config)) == want


def test_rows_that_do_not_count_become_the_first_that_does() -> None:
    rows = {"x": jnp.asarray([[jnp.nan], [2.0], [3.0]]), "y": jnp.asarray([-100, 5, 6])}
    clean = without_uncounted(rows, jnp.asarray([False, True, True]))
    np.testing.assert_array_equal(clean["x"], [[2], [2], [3]])
    np.testing.assert_array_equal(clean["y"], [5, 5, 6])
    none = without_uncounted(rows, jnp.zeros(3, bool))
    assert_trees_close(none, jax.tree.map(jnp.zeros_like, rows), rtol=0)


def classified(pixels: Any, counted: Any) -> tuple[Any, Any]:
    """The loss and the running averages after rows of which some do not count."""
    objective = Supervised(
        source=loaded(Perceptron(norm=True), PIXELS),
        reads={"pixels": jax.ShapeDtypeStruct((5,), jnp.float32)},
        criterion=Classification(),
        collections=("batch_stats",),
    )
    variables = objective.init(jax.random.key(0))
    batch = {
        "pixels": pixels,
        "labels": jnp.where(counted, jnp.asarray([0, 1, 2, 0]), 2**31 - 1),
        "loss_mask": counted,
    }
    step = Step(jnp.int32(0), jax.random.key(0))
    stats, aux = jax.jit(objective.loss)(variables, batch, step)
    return (stats, aux.variables), variables["batch_stats"]


def test_running_averages_see_no_row_that_does_not_count() -> None:
    pixels = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)), jnp.float32)
    counted = jnp.asarray([True, True, False, True])
    spoilt = pixels.at[2].set(jnp.nan)
    clean = pixels.at[2].set(pixels[0])
    found, _ = classified(spoilt, counted)
    want, _ = classified(clean, counted)
    assert_trees_close(found, want, rtol=0)
    (_, updated), before = classified(spoilt, jnp.zeros(4, bool))
    assert_trees_close(updated["batch_stats"], before, rtol=0)


def test_labels_of_padding_do_not_count() -> None:
    objective = MaskedLM(
        source=loaded(tiny_decoder(), TEXT), seq_len=6, vocab=11, mask_id=10
    )
    variables = objective.init(jax.random.key(0))
    mask = np.arange(6)[None] < np.asarray([[4], [2]])
    tokens = np.random.default_rng(0).integers(0, 11, (2, 6), np.int32)
    batch = {"tokens": tokens, "labels": tokens, "mask": mask}
    step = Step(jnp.int32(0), jax.random.key(0))
    stats, _ = jax.jit(objective.loss)(variables, batch, step)
    assert float(stats.mass) == 6
