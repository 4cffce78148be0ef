"""Conversion of tensors to arrays and back through DLPack, with or without a copy.

The rules, for both directions:

* *Sharing* is the default: memory is shared or the conversion is refused, and nothing
  is copied unless `copy=True`. Tensor and array then use the same memory. JAX takes its
  arrays for immutable, so neither side may write to it: a torch in-place edit shows in
  the array, and one made while a computation still runs corrupts that computation. A
  shared tensor must never be reused as an output buffer.
* *Copying* (`copy=True`) always allocates new memory.
* *dtype*: bool, the integers up to 32 bits, float16, bfloat16, float32, complex64 and
  fp8 (e4m3fn, e5m2) share. Without x64 JAX has no 64-bit types: int64 needs a copy,
  which is checked to fit int32; float64 and complex128 are refused, as they would be
  rounded.
* *stride*: whatever is dense shares, transposed or not. A slice with gaps and an
  expanded tensor need a copy.
* *alignment*: XLA's CPU buffers start at a multiple of 64 bytes; a tensor that does not
  (a slice, weights inside a file mapping) needs a copy.
* *grad*: a leaf that requires grad is handed over detached. A tensor with a history is
  refused: its gradient would be lost silently. `as_torch_module` carries gradients.
* *lifetime*: each side keeps the other's memory alive. Donating a shared array is safe:
  JAX does not reuse memory that torch still views.
* *device*: data stays where it is. An array on several devices needs a copy, which
  gathers it.
"""

from collections.abc import Callable, Mapping

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import PyTree

from dew.bridges.dtypes import jax_canonical, jax_dtype, jax_stored

ALIGNMENT = 64
"""Bytes that XLA's CPU buffers start at a multiple of."""

_INT32 = np.iinfo(np.int32)


def to_jax(tree: PyTree, *, copy: bool = False) -> PyTree:
    """Converts the tensors in a tree of dicts, lists and tuples to JAX arrays.

    Leaves of other types are returned unchanged. Memory is shared unless `copy`:

    >>> tree = to_jax({"x": torch.zeros(2, 3), "name": "w0"}, copy=True)
    >>> tree["x"].shape, tree["name"]
    ((2, 3), 'w0')

    Raises:
        ValueError: a tensor breaks one of the module's rules on sharing or, with
            `copy`, has a dtype that JAX cannot hold; the message names the tensor and
            the remedy.
    """
    return _map_leaves(lambda name, x: _array(name, x, copy), torch.Tensor, tree, "")


def to_torch(tree: PyTree, *, copy: bool = False) -> PyTree:
    """Converts the JAX arrays in a tree of dicts, lists and tuples to tensors.

    Leaves of other types are returned unchanged. Memory is shared unless `copy`, and
    the call waits for arrays that are still being computed:

    >>> to_torch([jnp.arange(3), None])
    [tensor([0, 1, 2], dtype=torch.int32), None]

    Raises:
        ValueError: an array is traced, or is spread over several devices without
            `copy`.
    """
    return _map_leaves(lambda name, x: _tensor(name, x, copy), jax.Array, tree, "")


def _map_leaves(
    convert: Callable[[str, PyTree], PyTree], kind: type, tree: PyTree, name: str
) -> PyTree:
    """Converts the leaves of one type, each with its path for error messages."""
    if isinstance(tree, kind):
        return convert(name or "the value", tree)
    match tree:
        case Mapping():
            return {
                key: _map_leaves(
                    convert, kind, value, f"{name}.{key}" if name else str(key)
                )
                for key, value in tree.items()
            }
        case list():
            return [
                _map_leaves(convert, kind, v, f"{name}[{i}]")
                for i, v in enumerate(tree)
            ]
        case tuple():
            return tuple(
                _map_leaves(convert, kind, v, f"{name}[{i}]")
                for i, v in enumerate(tree)
            )
        case _:
            return tree


def _array(name: str, tensor: torch.Tensor, copy: bool) -> jax.Array:
    if tensor.grad_fn is not None:
        raise ValueError(
            f"{name} has an autograd history that JAX would lose; call .detach() on "
            "it, or use dew.bridges.as_torch_module to differentiate through JAX"
        )
    tensor = tensor.detach()
    stored = jax_stored(tensor.dtype)
    if jax_canonical(stored) != stored:
        tensor = _narrow_to_int32(name, tensor, copy)
    if copy:
        dense = tensor.contiguous().resolve_conj()
        return jnp.array(jnp.from_dlpack(dense), copy=True)
    try:
        array = jnp.from_dlpack(tensor)
    except (BufferError, RuntimeError, jax.errors.JaxRuntimeError, TypeError) as fault:
        raise ValueError(
            f"{name}, {_kind(tensor)} with strides {tensor.stride()}, cannot be shared "
            f"with JAX ({str(fault).splitlines()[0]}); pass copy=True"
        ) from fault
    if tensor.numel() and array.unsafe_buffer_pointer() != tensor.data_ptr():
        raise ValueError(
            f"{name}, {_kind(tensor)}, starts {tensor.data_ptr() % ALIGNMENT} bytes "
            f"past a multiple of {ALIGNMENT}, so JAX cannot share it; pass copy=True"
        )
    return array


def _narrow_to_int32(name: str, tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """Returns 64-bit integers in 32 bits, if a copy is allowed and they fit."""
    if tensor.dtype not in (torch.int64, torch.uint64):
        raise ValueError(
            f"{name} is {tensor.dtype} and JAX would round it to "
            f"{jax_dtype(tensor.dtype)}; convert it first, or set jax_enable_x64"
        )
    if not copy:
        raise ValueError(
            f"{name} is {tensor.dtype}, which JAX without jax_enable_x64 holds in 32 "
            "bits; pass copy=True"
        )
    if tensor.numel() and not (
        _INT32.min <= int(tensor.min()) and int(tensor.max()) <= _INT32.max
    ):
        raise ValueError(
            f"{name} holds integers from {int(tensor.min())} to {int(tensor.max())}, "
            "which do not fit int32; set jax_enable_x64"
        )
    return tensor.to(torch.int32)


def _tensor(name: str, array: jax.Array, copy: bool) -> torch.Tensor:
    if isinstance(array, jax.core.Tracer):
        raise ValueError(
            f"{name} is being traced by a JAX transformation and has no memory to hand "
            "over; call to_torch outside of jit, grad and vmap"
        )
    if len(array.sharding.device_set) > 1:
        if not copy:
            raise ValueError(
                f"{name} lies on {len(array.sharding.device_set)} devices and one "
                "torch tensor cannot; pass copy=True to gather it"
            )
        array = jax.device_put(array, jax.local_devices(backend="cpu")[0])
    tensor = torch.from_dlpack(array)
    return tensor.clone() if copy else tensor


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
