"""A scanned stack against an unrolled one, of layers that are alike or differ."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dew.converters.families import FAMILIES
from dew.nn.decoder import Decoder
from tests.converters.families.decoders import TINY
from tests.support import hf_models as hf
from tests.support.tolerances import RTOL, assert_trees_close

DIFFER = (
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "smollm3",
)
ALIKE = ("bloom", "gpt2", "mistral", "mixtral", "opt")
CASES = (*((name, True) for name in ALIKE), *((name, False) for name in DIFFER))
SAMPLE = (random.Random(0).choice(ALIKE), random.Random(0).choice(DIFFER))


@pytest.mark.parametrize(
    ("family", "is_scanned"),
    [
        pytest.param(*case, marks=() if case[0] in SAMPLE else pytest.mark.full)
        for case in CASES
    ],
)
def test_a_scan_has_the_logits_and_gradients_of_unrolled_blocks(
    family: str, is_scanned: bool
) -> None:
    tiny = TINY[family]
    config = FAMILIES[family].read(tiny.config(**tiny.fields).to_dict())
    plain = Decoder(config)
    inputs = {"tokens": jnp.asarray(hf.tokens(seq=12), jnp.int32)}
    variables = jax.jit(plain.init)(jax.random.key(0), inputs)
    scanned: Any = replace(plain, scan=True)
    assert bool(scanned.banks()) == is_scanned

    def total(params: Any, model: Any) -> tuple[jax.Array, jax.Array]:
        logits = model.apply({**variables, "params": params}, inputs).logits
        return jnp.sum(jnp.square(logits)), logits

    got, want = (
        jax.jit(jax.grad(partial(total, model=model), has_aux=True))(
            variables["params"]
        )
        for model in (scanned, plain)
    )
    assert_trees_close(
        got, want, rtol=RTOL["float32"], atol=RTOL["float32"] * largest(want)
    )


def largest(tree: Any) -> float:
    return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(tree))
