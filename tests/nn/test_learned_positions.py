"""Texts and positions that a table of learned positions has no rows for."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dew.nn.config import Embedding
from dew.nn.decoder import read_cached
from tests.support.models import tiny_decoder

ROWS = 6


def model_and_variables(**changes: Any) -> tuple[Any, Any]:
    plain = tiny_decoder()
    embedding = Embedding(positions=ROWS, **changes)
    model = replace(plain, config=replace(plain.config, embedding=embedding))
    return model, model.init(jax.random.key(0), text(ROWS))


def text(length: int, **inputs: Any) -> dict[str, Any]:
    tokens = jnp.arange(length, dtype=jnp.int32)[None] % 5
    return {"tokens": tokens, **{k: jnp.asarray([v]) for k, v in inputs.items()}}


def test_a_text_longer_than_the_table_is_refused_compiled_or_not() -> None:
    model, variables = model_and_variables()
    message = "7 tokens needs 7 learned positions, and the table has 6 rows"
    for apply in (model.apply, jax.jit(model.apply)):
        with pytest.raises(ValueError, match=message):
            apply(variables, text(7))
    with pytest.raises(ValueError, match=message):
        model.empty_cache(1, 7, jnp.float32)


def test_positions_without_a_row_are_refused_where_they_can_be_seen() -> None:
    model, variables = model_and_variables()
    for stated in ([0, 1, 6], [-1, 0, 1]):
        with pytest.raises(ValueError, match=r"must lie in \[0, 6\).* has 6 rows"):
            model.apply(variables, text(3, positions=stated))
    again = model.apply(variables, text(8, positions=[*range(4), *range(4)]))
    assert jnp.isfinite(again.logits).all()


@pytest.mark.parametrize("position", [-1, 6])
def test_a_compiled_call_makes_nan_of_a_row_with_such_a_position(position: int) -> None:
    model, variables = model_and_variables()
    inputs = {
        "tokens": jnp.zeros((2, 3), jnp.int32),
        "positions": jnp.asarray([[0, 1, position], [0, 1, 5]]),
    }
    logits = jax.jit(model.apply)(variables, inputs).logits
    assert jnp.isnan(logits[0]).all()
    assert jnp.isfinite(logits[1]).all()


def test_padding_takes_no_position_where_tokens_are_counted() -> None:
    model, variables = model_and_variables(offset=2, positions_from_mask=True)
    inputs = text(8, mask=[False, False, *[True] * 6])
    assert jnp.isfinite(model.apply(variables, inputs).logits).all()
    with pytest.raises(ValueError, match=r"in \[-2, 6\) .* got -1 to 6"):
        model.apply(variables, text(8, mask=[False, *[True] * 7]))


def test_a_full_cache_takes_no_more_tokens() -> None:
    model, variables = model_and_variables()
    cache = model.empty_cache(1, 4, jnp.float32)
    _, cache = read_cached(model, variables, cache, text(3))
    with pytest.raises(ValueError, match="of 4 tokens that holds 3 cannot take 2 more"):
        read_cached(model, variables, cache, text(2))
