"""One or more calls of every overload in the op table, as torch would write them.

A letter and a shape make a tensor: `f` normal floats, `b` booleans, `i` integers below
its first number; `p`, `u`, `q`, `h` floats of a range. The rest is passed as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dew.bridges.lowering.ops.aliases import ALIASES

RANGES = {"p": (0.2, 2), "u": (-0.9, 0.9), "q": (1.1, 3), "h": (0.1, 0.9)}


@dataclass(frozen=True)
class T:
    """A random tensor to be: its kind and its shape."""

    kind: str
    shape: tuple[int, ...]

    def made(self, seed: int, dtype: torch.dtype) -> torch.Tensor:
        rng = np.random.default_rng(seed)
        match self.kind[0]:
            case "i":
                high = int(self.kind[1:])
                return torch.from_numpy(rng.integers(0, high, self.shape))
            case "n":
                return torch.from_numpy(rng.integers(1, 5, self.shape))
            case "b":
                return torch.from_numpy(rng.random(self.shape) < 0.5)
            case "f":
                drawn = rng.standard_normal(self.shape) * 2
            case kind:
                low, high = RANGES[kind]
                drawn = rng.uniform(low, high, self.shape)
        return torch.from_numpy(np.asarray(drawn)).to(dtype)


def f(*shape: int) -> T:
    return T("f", shape)


def p(*shape: int) -> T:
    return T("p", shape)


def u(*shape: int) -> T:
    return T("u", shape)


def b(*shape: int) -> T:
    return T("b", shape)


def i(high: int, *shape: int) -> T:
    return T(f"i{high}", shape)


X = f(2, 3, 4)
EDGES = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1.0])
COMPLEX = torch.polar(torch.rand(5) + 0.5, torch.rand(5))
IMAGE = f(2, 4, 7, 9)
UNARY_POSITIVE = "acosh log log10 log2 log1p sqrt rsqrt reciprocal lgamma".split()
UNARY_UNIT = "acos asin atanh erfinv".split()
UNARY = (
    "abs asinh atan ceil cos cosh erf erfc exp exp2 expm1 floor frac hardsigmoid "
    "hardswish isfinite isinf isnan log_sigmoid mish neg relu relu6 selu sgn sigmoid "
    "sign silu sin sinh square tan tanh trunc gelu softplus elu leaky_relu hardtanh "
    "round nan_to_num alias detach clone contiguous lift lift_fresh lift_fresh_copy "
    "resolve_conj resolve_neg detach_copy alias_copy numpy_T _to_copy "
    "sum mean prod max min argmax argmin std var amax amin real atleast_1d atleast_2d "
    "empty_like_zeroed sort argsort squeeze glu conj angle"
).split()
FLOAT_BINARY = (
    "add sub rsub mul multiply div divide true_divide eq ne lt le gt ge"
).split()
INT_BINARY = (
    "bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ __lshift__ __rshift__"
).split()
CALLS: dict[str, list[tuple[Any, ...]]] = {
    **{f"{n}.default": [(X,)] for n in UNARY if n != "empty_like_zeroed"},
    **{f"{n}.default": [(p(2, 5),)] for n in UNARY_POSITIVE},
    **{f"{n}.default": [(u(2, 5),)] for n in UNARY_UNIT},
    # Ranges of whole numbers, no axes, no elements, and what no range has.
    **{
        f"{n}.default": [(X,), (i(9, 4),), (f(),), (f(0, 3),), (EDGES,)]
        for n in "abs exp neg relu sigmoid silu sqrt tanh sin cos".split()
    },
    "acosh.default": [(T("q", (4,)),)],
    **{f"{n}.Tensor": [(X, f(3, 1)), (f(), X)] for n in FLOAT_BINARY},
    **{f"{n}.Scalar": [(X, 3), (X, 0.5)] for n in FLOAT_BINARY},
    **{f"{n}.Tensor": [(i(9, 4), i(5, 4)), (i(9, 2, 4), i(5, 4))] for n in INT_BINARY},
    **{f"{n}.Scalar": [(i(9, 4), 2)] for n in INT_BINARY},
    "bitwise_left_shift.Tensor": [(i(9, 4), i(5, 4))],
    "bitwise_right_shift.Tensor": [(i(9, 4), i(5, 4))],
    "bitwise_not.default": [(i(9, 4),), (b(5),)],
    "logical_not.default": [(b(5),), (i(2, 5),)],
    "add.Tensor": [
        *[(X, f(3, 1), {"alpha": 2}), (i(9, 4), f(4)), (b(4), i(9, 4))],
        *[(2.0, X), (X, 2j), (X, 0.5)],
    ],
    "sub.Tensor": [(X, f(3, 1), {"alpha": 2}), (2.0, X), (X, 2j), (i(9, 4), f(4))],
    **{
        f"{n}.Tensor": [
            *[(X, f(3, 1)), (2.0, X), (X, 2j)],
            *[(b(4), b(4)), (i(9, 4), 0.5)],
        ]
        for n in ("mul", "multiply")
    },
    **{f"{n}.Scalar": [(X, 3, 2), (X, 0.5), (X, 2j)] for n in ("add", "sub", "rsub")},
    "rsub.Tensor": [(X, f(3, 1), {"alpha": 2})],
    **{f"{n}.Scalar": [(X, 3), (X, 2j), (i(9, 4), 0.5)] for n in ("mul", "multiply")},
    **{
        f"{n}.Scalar": [(X, 3), (EDGES, 0.0), (i(9, 4), 2.5), (X, 2j)]
        for n in ("eq", "ne")
    },
    **{
        f"{n}.Scalar": [(X, 3), (EDGES, 0.0), (i(9, 4), 2.5), (f(0, 3), 1)]
        for n in ("lt", "le", "gt", "ge")
    },
    **{
        f"{n}.Tensor": [(X, f(3, 1)), (f(), X), (EDGES, EDGES), (i(9, 4), f(4))]
        for n in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    "remainder.Tensor": [(X, p(4)), (i(9, 4), T("p", (4,)))],
    "remainder.Scalar": [(X, 1.5), (i(9, 4), 4)],
    "fmod.Tensor": [(X, p(4))],
    "fmod.Scalar": [(X, 1.5)],
    "copysign.Tensor": [(X, f(4))],
    "copysign.Scalar": [(X, -1.0)],
    "xlogy.Tensor": [(X, p(4))],
    "div.Tensor": [(X, p(4)), (i(9, 4), T("n", (4,)))],
    "div.Tensor_mode": [
        (X, p(4), {"rounding_mode": "floor"}),
        (X, p(4), {"rounding_mode": "trunc"}),
    ],
    "div.Scalar_mode": [
        (X, 0.5, {"rounding_mode": "floor"}),
        (i(9, 4), 4, {"rounding_mode": "trunc"}),
    ],
    "floor_divide.default": [
        (i(9, 4), 4 * torch.ones(4, dtype=torch.int64)),
        (X, p(4)),
    ],
    "floor_divide.Scalar": [(i(9, 4), 4)],
    "pow.Tensor_Scalar": [(X, 2), (X, 3.0), (p(3), 0.5), (p(3), -1)],
    "pow.Tensor_Tensor": [(p(4), f(4)), (X, torch.tensor(2.0)), (i(9, 4), i(5, 4))],
    "pow.Scalar": [(2, f(4)), (10000.0, f(4)), (2, i(5, 4)), (2j, f(4))],
    "float_power.Tensor_Scalar": [(p(4), 2.0)],
    **{
        f"{n}.default": [(X, f(3, 1))]
        for n in "maximum minimum fmax fmin atan2 hypot logaddexp".split()
    },
    "max.other": [(X, f(4))],
    "min.other": [(X, f(4))],
    **{f"logical_{n}.default": [(b(4), b(4))] for n in ("and", "or", "xor")},
    "clamp.default": [(X, -1, 1), (X, None, 0.5), (X, -0.5)],
    "clamp.Tensor": [(X, f(4))],
    "clip.default": [(X, -1, 1)],
    "clamp_min.default": [(X, 0.5)],
    "clamp_min.Tensor": [(X, f(4))],
    "clamp_max.default": [(X, 0.5)],
    "clamp_max.Tensor": [(X, f(4))],
    "where.self": [(b(3, 1), X, f(4))],
    "where.ScalarOther": [(b(2, 3, 4), X, 0.0)],
    "where.ScalarSelf": [(b(2, 3, 4), -1.0, X)],
    "where.Scalar": [(b(2, 3), 1.0, 0.0)],
    "masked_fill.Scalar": [(X, b(3, 4), -1e9), (X, b(3, 4), float("-inf"))],
    "masked_fill.Tensor": [(X, b(3, 4), f())],
    "addcmul.default": [(X, f(4), f(3, 1), {"value": 0.5})],
    "addcdiv.default": [(X, f(4), p(3, 1), {"value": 0.5})],
    "lerp.Scalar": [(X, f(4), 0.3)],
    "lerp.Tensor": [(X, f(4), u(4))],
    "isclose.default": [(X, X)],
    "gelu.default": [(X,), (X, {"approximate": "tanh"})],
    "leaky_relu.default": [(X, 0.2)],
    "prelu.default": [(f(2, 3, 4), p(3)), (X, p(1))],
    "_prelu_kernel.default": [(X, p(1, 3, 1))],
    "elu.default": [(X,), (X, 0.5)],
    "softplus.default": [(X,), (X, 2, 1)],
    "glu.default": [(X,), (f(2, 6), 1)],
    "threshold.default": [(X, 0.1, 20)],
    "round.decimals": [(X, {"decimals": 1})],
    "logit.default": [(T("h", (4,)),), (u(4), 0.1)],
    "nan_to_num.default": [
        (X,),
        (torch.tensor([float("nan"), float("inf"), 1.0]), 2.0),
    ],
    "_to_copy.default": [(X, {"dtype": torch.float64}), (f(4), {"dtype": torch.int32})],
    "to.device": [(X, torch.device("cpu"), torch.float64)],
    "to.dtype": [(X, torch.int32), (b(3), torch.float32)],
    "to.dtype_layout": [(X, {"dtype": torch.float16})],
    "to.other": [(X, i(9, 2))],
    "to.prim_Device": [(X, torch.device("cpu"))],
    "type_as.default": [(i(9, 3), X)],
    "view.default": [(X, [2, 12]), (X, [-1])],
    "reshape.default": [(X, [6, -1])],
    "_unsafe_view.default": [(X, [6, 4])],
    "view_copy.default": [(X, [6, 4])],
    "view_as.default": [(X, f(6, 4))],
    "reshape_as.default": [(X, f(6, 4))],
    "expand.default": [(f(3, 1), [2, -1, 4]), (f(), [2])],
    "expand_copy.default": [(f(3, 1), [2, -1, 4])],
    "expand_as.default": [(f(3, 1), X)],
    "broadcast_to.default": [(f(3, 1), [2, 3, 4])],
    "broadcast_tensors.default": [([f(3, 1), f(4)],)],
    "squeeze.default": [(f(2, 1, 3, 1),)],
    "squeeze.dim": [(f(2, 1, 3), 1), (X, 0), (f(1), -1)],
    "squeeze.dims": [(f(2, 1, 3, 1), [1, 3])],
    "unsqueeze.default": [(X, 1), (X, -1)],
    **{
        name: [(X, 1, 2), (X, -1, 0), (f(), 0, -1)]
        for name in ("transpose.int", "swapaxes.default", "swapdims.default")
    },
    "t.default": [(f(2, 3),), (f(3),)],
    "mT.default": [(X,)],
    "adjoint.default": [(X,)],
    **{
        f"{name}.default": [(X, [2, 0, 1]), (X, [-1, 0, -2]), (f(), [])]
        for name in ("permute", "permute_copy")
    },
    "movedim.int": [(X, 0, 2)],
    "movedim.intlist": [(X, [0, 1], [2, 0])],
    "flatten.using_ints": [(X, 1), (X, 0, 1), (f(),)],
    "unflatten.int": [(f(2, 12), 1, [3, -1])],
    "slice.Tensor": [(X, 1, 1), (X, 2, 0, 2**63 - 1), (X, 2, -3, -1), (X, 2, 0, 4, 2)],
    "slice_copy.Tensor": [(X, 1, 1)],
    "slice_scatter.default": [(X, f(2, 2, 4), 1, 1)],
    "narrow.default": [(X, 2, 1, 2)],
    "select.int": [(X, 1, 2), (X, -1, -1)],
    "select_copy.int": [(X, 1, 2)],
    "select_scatter.default": [(X, f(2, 4), 1, 2)],
    **{
        f"{n}.default": [([X, f(2, 1, 4)], 1), ([f(0), f(3)],), ([f(0), X], 1)]
        for n in ("cat", "concat")
    },
    "stack.default": [([X, X], 1)],
    "hstack.default": [([X, X],)],
    "vstack.default": [([X, X],)],
    "split.Tensor": [(X, 2, 1)],
    "split.sizes": [(X, [1, 2], 1)],
    "split_with_sizes.default": [(X, [1, 3], 2)],
    "split_copy.Tensor": [(X, 2, 1)],
    "split_with_sizes_copy.default": [(X, [1, 3], 2)],
    "tensor_split.sections": [(X, 2, 1)],
    "tensor_split.indices": [(X, [1], 1)],
    "chunk.default": [(X, 2, -1), (f(2, 7), 3, 1)],
    "unsafe_chunk.default": [(X, 2, -1)],
    "unbind.int": [(X, 1)],
    "unbind_copy.int": [(X, 1)],
    "repeat.default": [(X, [2, 1, 2]), (f(3), [2, 2])],
    "tile.default": [(X, [2, 2])],
    "repeat_interleave.self_int": [(X, 2, 1), (X, 2)],
    "roll.default": [(X, [1], [1]), (X, [1, -1], [0, 2]), (f(4), [1])],
    "flip.default": [(X, [0, 2])],
    "pad.default": [
        (X, [1, 2]),
        (X, [1, 0, 0, 2], "constant", 3.0),
        (X, [-1, 2]),
        (X, [1, 2], "reflect"),
        (X, [1, 2], "replicate"),
        (X, [1, 2], "circular"),
    ],
    "constant_pad_nd.default": [(X, [1, -1, 0, 2], 5.0)],
    "reflection_pad1d.default": [(X, [1, 2])],
    "reflection_pad2d.default": [(IMAGE, [1, 2, 2, 0])],
    "replication_pad1d.default": [(X, [1, 2])],
    "replication_pad2d.default": [(IMAGE, [1, 2, 2, 0])],
    "tril.default": [(f(3, 4),), (f(2, 4, 4), -1)],
    "triu.default": [(f(3, 4), 1)],
    "diagonal.default": [(f(3, 4),), (X, 1, 1, 2)],
    "unfold.default": [(X, 2, 2, 1), (f(9), 0, 4, 2)],
    "as_strided.default": [(f(12), [3, 4], [4, 1]), (f(12), [3, 3], [2, 1], 1)],
    "pixel_shuffle.default": [(f(2, 8, 3, 2), 2)],
    "pixel_unshuffle.default": [(f(2, 2, 4, 6), 2)],
    "meshgrid.default": [([f(3), f(2)],)],
    "meshgrid.indexing": [([f(3), f(2)], {"indexing": "xy"})],
    "sum.default": [(X,), (X, {"dtype": torch.float64}), (b(3, 4),)],
    "mean.default": [(X,), (i(9, 4), {"dtype": torch.float32})],
    "sum.dim_IntList": [(X, [1]), (X, [0, 2], True), (X, []), (b(3, 4), [1])],
    "mean.dim": [(X, [-1], True), (X, [0, 1]), (X, [1], {"dtype": torch.float64})],
    "prod.dim_int": [(X, 1)],
    "amax.default": [(X, [1]), (X,)],
    "amin.default": [(X, [1], True)],
    "max.dim": [(X, 1), (X, -1, True)],
    "min.dim": [(X, 1)],
    "argmax.default": [(X,), (X, 1), (X, -1, True)],
    "argmin.default": [(X, 1)],
    **{f"{n}.default": [(b(3, 4),)] for n in ("any", "all")},
    **{f"{n}.dim": [(b(3, 4), 1), (b(3, 4), 0, True)] for n in ("any", "all")},
    **{f"{n}.dims": [(b(3, 4), [0, 1])] for n in ("any", "all")},
    "var.dim": [(X, [1]), (X, [1], False, True)],
    "std.dim": [(X, [1]), (X, [1], False, True)],
    "var.correction": [(X, [1]), (X, [0, 1], {"correction": 0, "keepdim": True})],
    "std.correction": [(X, [1]), (X, None, {"correction": 0})],
    "var_mean.correction": [(X, [1], {"correction": 0})],
    "std_mean.correction": [(X, [1])],
    "norm.Scalar": [(X,)],
    "norm.ScalarOpt_dim": [
        *[(X, 2, [1]), (X, 1, [1], True), (X, float("inf"), [1])],
        *[(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), order, [1]) for order in (1, 2)],
    ],
    "linalg_vector_norm.default": [(X, 2, [-1], True), (X, 3, [1]), (X, 0, [1])],
    "linalg_norm.default": [(f(5),)],
    "logsumexp.default": [(X, [1]), (X, [0, 2], True)],
    "softmax.int": [(X, -1), (X, 1, torch.float32)],
    "_softmax.default": [(X, 1, False)],
    "special_softmax.default": [(X, 1)],
    "log_softmax.int": [(X, -1)],
    "_log_softmax.default": [(X, 1, False)],
    "cumsum.default": [(X, 1), (b(3, 4), 1), (i(9, 4), 0)],
    "cumprod.default": [(X, 1)],
    "logcumsumexp.default": [(X, -1)],
    "cummax.default": [(X, 1)],
    "diff.default": [(X,), (i(9, 3, 4), {"prepend": i(9, 3, 1)}), (b(3, 4),)],
    "histc.default": [(p(20), 5, 0, 2), (T("p", (20,)), 4)],
    "count_nonzero.default": [(i(2, 4),)],
    "count_nonzero.dim_IntList": [(i(2, 3, 4), [1])],
    "linear.default": [
        (X, f(5, 4)),
        (X, f(5, 4), f(5)),
        (f(4), f(5, 4)),
        (f(4), f(4)),
        (f(0, 4), f(5, 4)),
    ],
    "matmul.default": [
        *[(X, f(4, 5)), (f(4), f(4)), (f(2, 1, 3, 4), f(2, 4, 5))],
        *[(X, f(4)), (f(4), f(4, 5)), (f(0, 4), f(4, 5))],
    ],
    "mm.default": [(f(3, 4), f(4, 5)), (f(3, 0), f(0, 5)), (i(9, 3, 4), i(9, 4, 2))],
    "bmm.default": [(X, f(2, 4, 5)), (f(0, 3, 4), f(0, 4, 5))],
    "mv.default": [(f(3, 4), f(4)), (f(0, 4), f(4))],
    "dot.default": [(f(4), f(4)), (f(0), f(0))],
    "outer.default": [(f(3), f(4))],
    "addmm.default": [
        (f(5), f(3, 4), f(4, 5)),
        (f(5), f(3, 4), f(4, 5), {"beta": 0, "alpha": 2}),
    ],
    "baddbmm.default": [(f(2, 3, 5), X, f(2, 4, 5), {"beta": 0.5, "alpha": 2})],
    "addmv.default": [(f(3), f(3, 4), f(4))],
    "addbmm.default": [(f(3, 5), X, f(2, 4, 5))],
    "einsum.default": [("bij,bkj->bik", [X, f(2, 5, 4)])],
    "bilinear.default": [(f(2, 3), f(2, 4), f(5, 3, 4), f(5))],
    "tensordot.default": [(X, f(4, 3), [1, 2], [1, 0])],
    "cosine_similarity.default": [(X, f(2, 3, 4), -1)],
    "scaled_dot_product_attention.default": [
        (f(2, 4, 5, 8), f(2, 4, 5, 8), f(2, 4, 5, 8)),
        (f(2, 4, 5, 8), f(2, 4, 7, 8), f(2, 4, 7, 8), b(2, 1, 5, 7)),
        (f(2, 4, 5, 8), f(2, 4, 7, 8), f(2, 4, 7, 8), f(5, 7)),
        (f(2, 4, 5, 8), f(2, 4, 7, 8), f(2, 4, 7, 8), None, 0.0, True),
        (f(2, 4, 3, 8), f(2, 4, 3, 8), f(2, 4, 3, 8), torch.zeros(3, 3) > 0),
        (f(2, 4, 5, 8), f(2, 2, 5, 8), f(2, 2, 5, 8), {"enable_gqa": True}),
        (f(2, 4, 5, 8), f(2, 4, 5, 8), f(2, 4, 5, 8), {"scale": 0.3}),
    ],
    "embedding.default": [(f(9, 4), i(9, 2, 3)), (f(9, 4), i(9, 2, 3), 2)],
    "index.Tensor": [
        (X, [i(2, 5)]),
        (X, [None, i(3, 2, 5)]),
        (X, [i(2, 3, 1), None, i(4, 5)]),
    ],
    "_unsafe_index.Tensor": [(X, [i(2, 5)])],
    "index_put.default": [
        (X, [torch.tensor([1])], f(1, 3, 4)),
        (X, [i(2, 6)], f(6, 3, 4), True),
        (X, [b(2, 3)], f(4)),
        (X, [b(2, 3, 4)], f()),
    ],
    "_unsafe_index_put.default": [(X, [i(2, 6)], f(6, 3, 4), True)],
    "masked_scatter.default": [(X, b(2, 3, 4), f(24)), (X, b(2, 3, 1), f(24))],
    "index_select.default": [(X, 1, i(3, 5))],
    "gather.default": [(X, 1, i(3, 2, 5, 4)), (X, -1, i(4, 2, 2, 3))],
    "take_along_dim.default": [(X, i(3, 2, 2, 4), 1)],
    "take.default": [(X, i(24, 5))],
    "scatter.src": [(f(2, 5), 1, torch.tensor([[4, 1], [0, 2]]), f(2, 3))],
    "scatter.value": [(X, 1, i(3, 2, 1, 4), 7.0)],
    "scatter.reduce": [(X, 1, i(3, 2, 3, 4), f(2, 3, 4), {"reduce": "add"})],
    "scatter_add.default": [(X, 1, i(3, 2, 5, 4), f(2, 5, 4))],
    "scatter_reduce.two": [
        *[
            (X, 1, i(3, 2, 3, 4), f(2, 3, 4), how)
            for how in ("sum", "prod", "amax", "amin", "mean")
        ],
        (X, 1, i(3, 2, 3, 4), f(2, 3, 4), "amax", {"include_self": False}),
        (X, 1, i(3, 2, 3, 4), f(2, 3, 4), "mean", {"include_self": False}),
    ],
    "index_add.default": [(X, 1, i(3, 5), f(2, 5, 4))],
    "index_copy.default": [(X, 1, torch.tensor([2, 0]), f(2, 2, 4))],
    "index_fill.int_Scalar": [(X, 1, torch.tensor([2, 0]), 3.0)],
    "sort.default": [(X,), (X, 1, True)],
    "sort.stable": [(i(3, 9), {"stable": True, "descending": True})],
    "argsort.stable": [(i(3, 9), {"stable": True, "descending": True})],
    "topk.default": [(X, 2), (X, 2, 1), (X, 2, -1, False)],
    "bucketize.Tensor": [
        (f(2, 3), torch.tensor([-1.0, 0.0, 1.0])),
        (i(9, 5), torch.arange(4)),
    ],
    "searchsorted.Tensor": [
        (torch.tensor([-1.0, 0.0, 1.0]), f(2, 3)),
        (torch.arange(8).view(2, 4), i(9, 2, 3), {"right": True}),
    ],
    "one_hot.default": [(i(5, 2, 3), 5)],
    "bincount.default": [(torch.tensor([0, 3, 3, 1]), None, 4)],
    "isin.Tensor_Tensor": [(i(9, 2, 3), i(9, 4))],
    "isin.Tensor_Scalar": [(i(9, 2, 3), 3)],
    "tril_indices.default": [(3, 4), (4, 4, -1)],
    "arange.default": [(5,), (2.5,), (5, {"dtype": torch.int64})],
    "arange.start": [(2, 7), (2, 7, {"dtype": torch.float32})],
    "arange.start_step": [(0, 8, 2), (0, 1, 0.25)],
    "full.default": [([2, 3], 1.5)],
    "zeros.default": [([2, 3],), ([2], {"dtype": torch.int64})],
    "ones.default": [([2],), ([2], {"dtype": torch.int64}), ([], {})],
    "full_like.default": [(X, 2)],
    "zeros_like.default": [(X,), (X, {"dtype": torch.int64})],
    "ones_like.default": [(X,), (X, {"dtype": torch.int64})],
    "new_full.default": [(X, [2], 3.0)],
    "new_zeros.default": [(X, [2])],
    "new_ones.default": [(X, [], {"dtype": torch.bool})],
    "eye.default": [(3,)],
    "eye.m": [(3, 4)],
    "linspace.default": [(0, 1, 5)],
    "scalar_tensor.default": [(2.5,), (2, {"dtype": torch.int64}), (True, {})],
    "fill.Scalar": [(X, 2.0)],
    "fill.Tensor": [(X, f())],
    "copy.default": [(X, f(4))],
    "layer_norm.default": [
        (X, [4], p(4), f(4)),
        (X, [3, 4]),
        (X, [4], None, f(4), 1e-3, False),
    ],
    "native_layer_norm.default": [(X, [4], p(4), f(4), 1e-5)],
    "_weight_norm.default": [(f(4, 3, 2), p(4, 1, 1)), (f(4, 3, 2), p(1, 1, 2), 2)],
    "_weight_norm_interface.default": [(f(4, 3, 2), p(4, 1, 1))],
    "rms_norm.default": [(X, [4], p(4)), (X, [4], None, 1e-6)],
    "group_norm.default": [(f(2, 6, 5), 3, p(6), f(6)), (f(2, 6, 3, 3), 2)],
    "native_group_norm.default": [(f(2, 6, 5), p(6), f(6), 2, 6, 5, 3, 1e-5)],
    "batch_norm.default": [
        (IMAGE, p(4), f(4), f(4), p(4), False, 0.1, 1e-5, False),
        (IMAGE, p(4), f(4), None, None, True, 0.1, 1e-5, False),
    ],
    "_native_batch_norm_legit_functional.default": [
        (IMAGE, p(4), f(4), f(4), p(4), True, 0.1, 1e-5)
    ],
    "_native_batch_norm_legit_no_training.default": [
        (IMAGE, p(4), f(4), f(4), p(4), 0.1, 1e-5)
    ],
    "instance_norm.default": [(IMAGE, p(4), f(4), None, None, True, 0.1, 1e-5, False)],
    "lstm.input": [
        (
            f(5, 2, 3),
            [f(2, 2, 4), f(2, 2, 4)],
            [w for _ in range(2) for w in (f(16, 3), f(16, 4), f(16), f(16))],
            *(True, 1, 0.0, False, True, False),
        )
    ],
    "gru.input": [
        (
            f(2, 5, 3),
            f(1, 2, 4),
            [f(12, 3), f(12, 4)],
            *(False, 1, 0.0, False, False, True),
        )
    ],
    "rnn_tanh.input": [
        (
            f(5, 2, 3),
            f(2, 2, 4),
            [f(4, 3), f(4, 4), f(4), f(4), f(4, 4), f(4, 4), f(4), f(4)],
            *(True, 2, 0.0, False, False, False),
        )
    ],
    "rnn_relu.input": [
        (
            f(5, 2, 3),
            f(1, 2, 4),
            [f(4, 3), f(4, 4), f(4), f(4)],
            *(True, 1, 0.0, False, False, False),
        )
    ],
    "conv1d.default": [
        (f(2, 4, 9), f(6, 4, 3)),
        (f(2, 4, 9), f(6, 2, 3), f(6), [2], [1], [2], 2),
    ],
    "conv1d.padding": [(f(2, 4, 9), f(6, 4, 4), None, [1], "same")],
    "conv2d.default": [
        (IMAGE, f(6, 4, 3, 2), f(6), [2, 1], [1, 0]),
        (f(4, 7, 9), f(6, 4, 3, 3)),
    ],
    "conv2d.padding": [(IMAGE, f(6, 4, 3, 3), None, [1, 1], "valid")],
    "conv3d.default": [(f(1, 2, 4, 5, 6), f(3, 2, 2, 2, 2))],
    "conv3d.padding": [(f(1, 2, 4, 5, 6), f(3, 2, 2, 2, 2), None, [1, 1, 1], "same")],
    "conv_transpose1d.default": [
        (f(2, 4, 5), f(4, 3, 3), f(3), [2], [1], [1]),
        (f(2, 4, 5), f(4, 3, 3), None, [1], [0], [0], 2, [2]),
    ],
    "conv_transpose2d.input": [(f(2, 4, 5, 3), f(4, 3, 3, 2), f(3), [2, 1], [1, 0])],
    "conv_transpose3d.input": [(f(1, 2, 3, 3, 3), f(2, 3, 2, 2, 2))],
    "convolution.default": [
        (f(2, 4, 9), f(6, 4, 3), None, [1], [1], [1], False, [0], 1),
        (f(2, 4, 9), f(4, 6, 3), None, [2], [1], [1], True, [1], 1),
    ],
    "max_pool1d.default": [(f(2, 4, 9), [3], [2], [1])],
    "max_pool2d.default": [
        (IMAGE, [3, 2]),
        (IMAGE, [3, 3], [2, 2], [1, 1], [1, 1], True),
    ],
    "max_pool3d.default": [(f(1, 2, 4, 5, 6), [2, 2, 2])],
    "avg_pool1d.default": [(f(2, 4, 9), [3], [2], [1])],
    "avg_pool2d.default": [
        (IMAGE, [3, 2]),
        (IMAGE, [3, 3], [2, 2], [1, 1], True),
        (IMAGE, [3, 3], [2, 2], [1, 1], True, False),
    ],
    "avg_pool3d.default": [(f(1, 2, 4, 5, 6), [2, 2, 2])],
    "adaptive_avg_pool1d.default": [(f(2, 4, 9), [4])],
    "adaptive_avg_pool2d.default": [(IMAGE, [3, 4]), (IMAGE, [1, 1])],
    "adaptive_avg_pool3d.default": [(f(1, 2, 4, 5, 6), [2, 3, 2])],
    "upsample_nearest1d.vec": [(f(2, 3, 5), [8], None), (f(2, 3, 5), None, [1.7])],
    "upsample_nearest2d.vec": [(IMAGE, [5, 13], None), (IMAGE, None, [2.0, 2.0])],
    "upsample_nearest3d.vec": [(f(1, 2, 4, 5, 6), [3, 6, 6], None)],
    "upsample_linear1d.vec": [
        (f(2, 3, 5), [8], False, None),
        (f(2, 3, 5), [8], True, None),
    ],
    "upsample_bilinear2d.vec": [
        (IMAGE, [5, 13], False, None),
        (IMAGE, [5, 13], True, None),
        (IMAGE, None, False, [1.7, 0.6]),
    ],
    "upsample_trilinear3d.vec": [(f(1, 2, 4, 5, 6), [3, 6, 6], False, None)],
    "upsample_bicubic2d.vec": [
        (IMAGE, [5, 13], False, None),
        (IMAGE, [5, 13], True, None),
        (IMAGE, None, False, [1.7, 0.6]),
    ],
    "_upsample_bilinear2d_aa.vec": [(IMAGE, [4, 13], False, None)],
    "_upsample_bicubic2d_aa.vec": [(IMAGE, [4, 13], False, None)],
    "view_as_real.default": [(torch.polar(torch.rand(3), torch.rand(3)),)],
    "view_as_complex.default": [(torch.randn(3, 2),)],
    "polar.default": [(torch.rand(3), torch.rand(3))],
    "complex.default": [(torch.rand(3), torch.rand(3))],
    "imag.default": [(torch.polar(torch.rand(3), torch.rand(3)),)],
    "fft_rfft.default": [(torch.randn(2, 8),)],
    "fft_irfft.default": [(torch.polar(torch.rand(5), torch.rand(5)),)],
    "fft_fft.default": [(torch.randn(2, 8),)],
    "fft_ifft.default": [(torch.randn(2, 8),)],
    "fft_fft2.default": [(torch.randn(2, 4, 4), None, [-2, -1])],
    "fft_fftn.default": [(torch.randn(2, 4),)],
    "linalg_solve_triangular.default": [
        (torch.eye(3) + torch.ones(3, 3).tril(), torch.rand(3, 2), {"upper": False}),
        (
            torch.eye(3) + torch.ones(3, 3).triu(),
            torch.rand(2, 3),
            {"upper": True, "left": False},
        ),
    ],
    "im2col.default": [
        (IMAGE, [3, 2], [1, 1], [1, 0], [2, 1]),
        (f(4, 7, 9), [3, 3], [2, 1], [0, 1], [1, 2]),
    ],
    "col2im.default": [
        (f(2, 4 * 6, 4 * 8), [7, 9], [3, 2], [1, 1], [1, 0], [2, 1]),
        (f(4 * 9, 3 * 5), [7, 9], [3, 3], [2, 1], [0, 1], [1, 2]),
    ],
    "linalg_inv.default": [(torch.eye(3) * 2 + torch.ones(3, 3).tril(),)],
    "inverse.default": [(torch.eye(3) * 2 + torch.ones(3, 3).tril(),)],
    **{
        f"{n}.default": [(X, 0.5, False), (X, 0.0, True)]
        for n in ("dropout", "native_dropout")
    },
    "sym_size.int": [(X, 1)],
    "sym_numel.default": [(X,)],
    "feature_dropout.default": [(X, 0.5, False), (X, 0.0, True)],
    "_grouped_mm.default": [
        (
            torch.randn(6, 16).bfloat16(),
            torch.randn(3, 16, 8).bfloat16(),
            torch.tensor([2, 2, 6], dtype=torch.int32),
        )
    ],
}

MANY = [200, 100]
DRAWS: dict[str, list[tuple[list[Any], dict[str, Any]]]] = {
    "rand.default": [([MANY], {}), ([MANY], {"dtype": torch.float64})],
    "randn.default": [([MANY], {}), ([MANY], {"dtype": torch.float64})],
    "rand_like.default": [([torch.ones(MANY)], {"dtype": torch.float64})],
    "randn_like.default": [([torch.ones(MANY)], {"dtype": torch.float64})],
    "bernoulli.default": [([torch.full(MANY, 0.3)], {})],
    "bernoulli.p": [([torch.ones(MANY), 0.3], {})],
    "uniform.default": [([torch.ones(MANY), -2.0, 3.0], {})],
    "randint.default": [([7, MANY], {}), ([7, MANY], {"dtype": torch.int32})],
    "randint.low": [([2, 7, MANY], {})],
    "randperm.default": [([2000], {})],
    "dropout.default": [([torch.ones(MANY), 0.25, True], {})],
    "feature_dropout.default": [([torch.ones(MANY), 0.25, True], {})],
}
"""Calls that draw random numbers, of which shape, mean and spread are compared."""


def cases() -> Iterator[tuple[str, int]]:
    """Yields each overload's name with the number of the call."""
    for name, calls in {**CALLS, **second_names()}.items():
        for number in range(len(calls)):
            yield f"aten.{name}", number


def second_names() -> dict[str, Any]:
    """Calls each op's other name as the op itself."""
    plain = [name.split(".") for name in CALLS]
    return {
        f"{alias}.{overload}": CALLS[f"{name}.{overload}"]
        for alias, named in ALIASES.items()
        for name, overload in plain
        if name == named and f"{alias}.{overload}" not in CALLS
    }


def call(
    name: str, number: int, dtype: torch.dtype
) -> tuple[list[Any], dict[str, Any]]:
    """Draws the arguments of a call; a float tensor written out keeps its dtype."""
    calls = {**CALLS, **second_names()}
    args = list(calls[name.removeprefix("aten.")][number])
    kwargs = dict(args.pop()) if isinstance(args[-1], dict) else {}

    def made(value: Any, seed: int) -> Any:
        if isinstance(value, T):
            return value.made(seed, dtype)
        if isinstance(value, list):
            return [made(item, seed * 100 + j) for j, item in enumerate(value)]
        return value

    drawn = [made(value, 1 + j) for j, value in enumerate(args)]
    return drawn, {k: made(v, 77 + j) for j, (k, v) in enumerate(kwargs.items())}
