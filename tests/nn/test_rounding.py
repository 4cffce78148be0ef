"""Half precision is rounded where torch's kernels round it: once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dew.nn.activations import ACTIVATIONS
from dew.nn.linear import affine
from tests.support.tolerances import RTOL

SHARE = 0.995
"""Of bfloat16 results that are the float64 value's own rounding; the least seen is
0.9996, and 0.85 where a product was rounded before its bias was added."""


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, jnp.bfloat16)


def exact(array: jax.Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32), np.float64)


def rounded(values: np.ndarray) -> np.ndarray:
    return exact(jnp.asarray(values, jnp.float32).astype(jnp.bfloat16))


def test_a_product_and_its_bias_are_rounded_once() -> None:
    x, weight, bias = numbers(64, 600), numbers(48, 600, seed=1), numbers(48, seed=2)
    got = exact(affine(x, weight, bias, 1))
    want = rounded(exact(x) @ exact(weight).T + exact(bias))
    assert np.mean(got == want) > SHARE


def test_gradients_of_a_product_and_its_bias_are_those_of_float64() -> None:
    args = numbers(64, 96), numbers(48, 96, seed=1), numbers(48, seed=2)
    weigh = numbers(64, 48, seed=3)
    got = jax.grad(
        lambda x, w, b: jnp.sum(affine(x, w, b, 1) * weigh, dtype=jnp.float32),
        argnums=(0, 1, 2),
    )(*args)
    x, weight = (exact(a) for a in args[:2])
    towards = exact(weigh)
    want = (towards @ weight, towards.T @ x, towards.sum(axis=0))
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == jnp.bfloat16
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(
            exact(mine) / scale, theirs / scale, atol=RTOL["bfloat16"], rtol=0
        )


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        (
            "gelu_pytorch_tanh",
            lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        ),
    ],
)
def test_an_activation_is_rounded_once(
    name: str, reference: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = numbers(4096)
    got = exact(ACTIVATIONS[name](x))
    want = rounded(reference(torch.tensor(exact(x))).numpy())
    assert np.mean(got == want) > SHARE
    slope = exact(jax.grad(lambda y: jnp.sum(ACTIVATIONS[name](y)))(x))
    leaf = torch.tensor(exact(x), requires_grad=True)
    reference(leaf).sum().backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(slope, leaf.grad.numpy(), atol=RTOL["bfloat16"])
