"""Tensors to arrays and back: what shares memory, what copies, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dew.bridges import to_jax, to_torch

SHARED = (
    "bool uint8 int8 int16 int32 float16 bfloat16 float32 complex64 float8_e4m3fn "
    "float8_e5m2"
).split()


def drawn(dtype: str, *shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(*shape) * 4).abs().to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", SHARED)
def test_every_shared_dtype_keeps_its_memory_both_ways(dtype: str) -> None:
    tensor = drawn(dtype, 3, 5)
    array = to_jax(tensor)
    back = to_torch(array)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() == back.data_ptr()
    assert str(array.dtype) == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", SHARED)
def test_a_copy_has_memory_and_values_of_its_own(dtype: str) -> None:
    tensor = drawn(dtype, 3, 5)
    array = to_jax(tensor, copy=True)
    back = to_torch(array, copy=True)
    pointers = {array.unsafe_buffer_pointer(), tensor.data_ptr(), back.data_ptr()}
    assert len(pointers) == 3
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_sharing_shows_edits_and_copying_does_not() -> None:
    tensor = torch.ones(4)
    shared, copied = to_jax(tensor), to_jax(tensor, copy=True)
    tensor.fill_(2)
    assert float(shared[0]) == 2
    assert float(copied[0]) == 1


def test_transposed_tensors_share() -> None:
    tensor = drawn("float32", 3, 5).T
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    np.testing.assert_array_equal(array, tensor)


def test_empty_and_scalar_tensors_cross() -> None:
    assert to_jax(torch.zeros(0, 3)).shape == (0, 3)
    assert float(to_jax(torch.tensor(3.0))) == 3


@pytest.mark.parametrize(
    ("tensor", "fault"),
    [
        (torch.zeros(8, 4)[:, ::2], "cannot be shared"),
        (torch.zeros(1, 4).expand(3, 4), "cannot be shared"),
        (torch.zeros(32)[1:], "4 bytes past a multiple of 64"),
        (torch.zeros(3, dtype=torch.int64), "holds in 32 bits; pass copy=True"),
    ],
)
def test_what_cannot_be_shared_is_refused_and_copies_when_asked(
    tensor: torch.Tensor, fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        to_jax({"weight": tensor})
    np.testing.assert_array_equal(to_jax(tensor, copy=True), tensor)


@pytest.mark.parametrize(
    ("tensor", "fault"),
    [
        (torch.zeros(3, dtype=torch.float64), "would round it to float32"),
        (torch.tensor([2**40]), "do not fit int32"),
        (torch.ones(3, requires_grad=True) * 2, "has an autograd history"),
    ],
)
def test_what_would_lose_something_is_refused_as_a_copy_too(
    tensor: torch.Tensor, fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        to_jax(tensor, copy=True)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantised_tensor_has_no_counterpart() -> None:
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=r"torch\.qint8 has no counterpart in JAX"):
        to_jax(quantised)


def test_a_leaf_that_requires_grad_crosses_detached() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    assert to_jax(weight).unsafe_buffer_pointer() == weight.data_ptr()


def test_trees_keep_their_form_and_faults_their_place() -> None:
    tree = {"a": [torch.ones(2), 5], "b": (torch.zeros(2), None)}
    out = to_jax(tree)
    assert out["a"][1] == 5
    assert out["b"][1] is None
    assert to_torch(out)["b"][0].tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"^a\[0\].x, float32\[2\]"):
        to_jax({"a": [{"x": torch.ones(4)[::2]}]})


def test_memory_outlives_the_side_that_made_it() -> None:
    array = to_jax(torch.full((1000,), 7.0))
    tensor = to_torch(jnp.full((1000,), 8.0))
    # Whatever was freed would be taken by these.
    _ = [torch.zeros(1000) for _ in range(50)], [jnp.zeros(1000) for _ in range(50)]
    assert float(array.sum()) == 7000
    assert float(tensor.sum()) == 8000


def test_an_array_on_two_devices_needs_a_copy() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    spread = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(ValueError, match="lies on 2 devices"):
        to_torch(spread)
    assert to_torch(spread, copy=True).tolist() == [0, 1, 2, 3]


def test_a_traced_value_has_no_memory_to_hand_over() -> None:
    with pytest.raises(ValueError, match="being traced"):
        jax.jit(lambda x: to_torch(x))(jnp.ones(2))
