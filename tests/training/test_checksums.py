"""Checksums of arrays: of every bit, of every place, and of no mesh."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dew.training.checksums import array_checksum, checksum_text
from dew.training.sharding import make_mesh

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "int8", "bool")


def text(array: jax.Array | np.ndarray) -> str:
    return checksum_text(np.asarray(array_checksum(jnp.asarray(array))))


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_changes_it(dtype: str) -> None:
    array = np.array(jnp.asarray(numbers(3, 5)).astype(dtype))
    whole = text(array)
    raw = array.view(np.uint8).reshape(-1)
    width = 1 if dtype == "bool" else 8
    for at in range(raw.size):
        for bit in range(width):
            raw[at] ^= 1 << bit
            assert text(array) != whole, (at, bit)
            raw[at] ^= 1 << bit
    assert text(array) == whole


def test_it_tells_zeros_by_their_sign_and_nans_by_their_bits() -> None:
    zeros, nans = np.zeros(4, np.float32), np.full(4, np.nan, np.float32)
    others = nans.copy()
    others.view(np.uint32)[2] ^= 1
    assert len({text(array) for array in (zeros, -zeros, nans, others)}) == 4


def test_any_exchange_of_elements_changes_it() -> None:
    array, rng = numbers(40, 30), random.Random(0)
    whole = text(array)
    flat = array.reshape(-1)
    for _ in range(100):
        i, j = rng.sample(range(flat.size), 2)
        flat[[i, j]] = flat[[j, i]]
        assert text(array) != whole, (i, j)
        flat[[i, j]] = flat[[j, i]]
    assert text(array[::-1]) != whole
    assert text(np.roll(array, 1, axis=1)) != whole


def test_checksums_of_many_arrays_are_all_different() -> None:
    # Small differences in few places: a weak mixing would map many to one sum.
    seen = set()
    for i in range(20):
        for j in range(20):
            array = np.zeros(64, np.float32)
            array[i], array[32 + j] = 1, 2
            seen.add(text(array))
    assert len(seen) == 400


def test_scalars_and_empty_arrays_have_one() -> None:
    assert text(np.array(1.0)) != text(np.array(2.0))
    assert text(np.zeros((0, 3), np.float32)) == "0" * 16


@pytest.mark.parametrize("shape", [(64, 48), (7, 16, 24), (1536,)])
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 2)])
def test_it_is_the_same_on_every_mesh(
    shape: tuple[int, ...], data: int, tensor: int
) -> None:
    array, mesh = numbers(*shape), make_mesh(data=data, tensor=tensor)
    alone = text(array)
    for at, size in enumerate(shape):
        for names in ("fsdp", ("tensor", "fsdp")):
            ways = np.prod([mesh.shape[name] for name in np.atleast_1d(names)])
            if size % ways:
                continue
            split = PartitionSpec(*[None] * at, names)
            placed = jax.device_put(array, NamedSharding(mesh, split))
            assert text(placed) == alone
