"""Casts keep every value that the dtype has, and round as torch does."""

import itertools
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from dew.converters.families import FAMILIES
from dew.converters.folder.dtypes import convert_checked, convert_dtype
from dew.converters.mapping.shapes import variable_shapes
from dew.tree import flatten
from tests.converters.families.decoders import TINY

BF16 = np.dtype(ml_dtypes.bfloat16)
BITS = np.arange(1 << 16, dtype=np.uint16)
"""Every number of 16 bits: subnormals, both zeros, infinities, all NaNs."""
NEAR_ONE = [1 + 2**-8, 1 + 2**-8 + 2**-20, 1 + 3 * 2**-8, 1 + 2**-11]
SMALL = [1e-45, -1e-40, 1e-8, 2**-24, 2**-25]
EDGES = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.9, 3.38e38, *SMALL, *NEAR_ONE],
    np.float32,
)


def torched(array: np.ndarray) -> torch.Tensor:
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def same_values(got: np.ndarray, want: torch.Tensor) -> None:
    wide, wanted = got.astype(np.float64), want.double().numpy()
    np.testing.assert_array_equal(wide, wanted)
    # A NaN is no number, and has no sign to keep.
    real = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(wide)[real], np.signbit(wanted)[real])


@pytest.mark.parametrize("half", [BF16, np.dtype(np.float16)])
def test_half_precision_widens_exactly(half: np.dtype) -> None:
    values = BITS.view(half)
    got = convert_dtype(values, np.dtype(np.float32))
    kept = ~np.isnan(values.astype(np.float32))
    same_values(got[kept], torched(values.copy()).float()[kept])
    assert np.isnan(got[~kept]).all()
    if half == BF16:
        np.testing.assert_array_equal(got.view(np.uint32) >> 16, BITS)


DTYPES = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: BF16,
}


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.permutations(DTYPES, 2)), ids=str
)
def test_every_pair_rounds_as_torch_does(source: Any, target: Any) -> None:
    random = np.random.default_rng(0).normal(size=4096) * 10.0 ** np.arange(
        -40, 24, 1 / 64
    )
    values = torch.tensor(np.concatenate([random, EDGES])).to(source)
    stored = DTYPES[source]
    raw = values.view(torch.uint8).numpy().view(stored)
    with np.errstate(over="ignore"):
        same_values(convert_dtype(raw, DTYPES[target]), values.to(target))


def test_what_is_cast_is_taken_without_another_copy() -> None:
    wide = convert_dtype(np.ones((300, 7), BF16).T, np.dtype(np.float32))
    array = jax.device_put(wide, jax.devices()[0])
    assert array.unsafe_buffer_pointer() == wide.ctypes.data
    same = np.ones(3, BF16)
    assert convert_dtype(same, BF16) is same


def test_only_numbers_that_were_finite_are_lost() -> None:
    edges = np.array([np.inf, np.nan, 1.0, 65519.9], np.float32)
    got = convert_checked("a", edges, np.dtype(np.float16))
    np.testing.assert_array_equal(got, np.array([np.inf, np.nan, 1, 65504], np.float16))
    large = np.ones(600_000, np.float32)
    large[-1] = 65520
    with pytest.raises(ValueError, match=r"a holds 65520\.0, more than float16 can"):
        convert_checked("a", large, np.dtype(np.float16))


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3_text", "llama", "qwen2_moe"])
def test_shapes_of_all_layers_follow_from_one_of_each_kind(name: str) -> None:
    family = FAMILIES[name]
    tiny = TINY[name]
    model = family.model(family.read(tiny.config(**tiny.fields).to_dict()))
    tokens = {"tokens": np.zeros((1, 1), np.int32)}
    whole = jax.eval_shape(model.init, jax.random.key(0), tokens)
    want = {path: leaf.shape for path, leaf in flatten(whole).items()}
    assert variable_shapes(model) == want
