"""ATen in JAX: one pure function an overload, keyed by the name torch writes it with.

`str(torch.ops.aten.add.Tensor)` is `"aten.add.Tensor"`. Names and not the overloads
themselves: a torch that lacks one of them still imports this table.
"""

from dew.bridges.lowering.ops import (
    conv,
    create,
    fft,
    index,
    matmul,
    norm,
    pointwise,
    random,
    recurrent,
    reduce,
    resize,
    shape,
    sizes,
)
from dew.bridges.lowering.ops.aliases import alias_entries
from dew.bridges.lowering.ops.from_torch2jax import FROM_TORCH2JAX as FROM_TORCH2JAX
from dew.bridges.lowering.ops.op import Op as Op
from dew.bridges.lowering.ops.op import torch_arithmetic as torch_arithmetic
from dew.bridges.lowering.ops.random import is_random as is_random

_NAMED: dict[str, Op] = {
    **pointwise.OPS,
    **shape.OPS,
    **create.OPS,
    **reduce.OPS,
    **matmul.OPS,
    **index.OPS,
    **norm.OPS,
    **conv.OPS,
    **resize.OPS,
    **fft.OPS,
    **random.OPS,
    **recurrent.OPS,
    **sizes.OPS,
}
TABLE: dict[str, Op] = {**alias_entries(_NAMED), **_NAMED}
"""Every op of dew's own, beside `FROM_TORCH2JAX` and what `dew.bridges.implements`."""

__all__ = ["FROM_TORCH2JAX", "TABLE", "Op", "is_random", "torch_arithmetic"]
