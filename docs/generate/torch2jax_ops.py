"""The table of docs/reference/torch2jax.md: whose function serves each ATen overload.

    python -m docs.generate.torch2jax_ops    # tries all and rewrites the table

Every function that torch2jax has for the op of an overload is put through dew's own
tests of that overload: values in three dtypes, gradients, draws. The first that fails
is the reason why dew's function stays. One that passes them all must also leave no more
operations in the graph than dew's, and belongs into `FROM_TORCH2JAX` then.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import torch
import torch2jax
from torch.utils import _pytree as pytree

from dew.bridges.lowering.interpreter import STORAGE, handler, own_function
from dew.bridges.lowering.ops import FROM_TORCH2JAX, TABLE, torch_arithmetic
from dew.bridges.lowering.ops.aliases import ALIASES
from docs.generate.page import table_lines, write_table
from tests import conftest as conftest
from tests.bridges.lowering import ops_cases
from tests.bridges.lowering.check_op import (
    RefusedError,
    check_draw,
    check_gradients,
    check_values,
    on_arrays,
    overload,
    to_jax,
)

SHOWN = 6
"""Numbers of a tensor that are written out."""

PAGE = Path(__file__).parents[1] / "reference" / "torch2jax.md"
COLUMNS = ("overload", "whose", "torch2jax has", "why dew's stays")

SAME: Mapping[str, str] = {
    **ALIASES,
    "concat": "cat",
    "float_power": "pow",
    "multiply": "mul",
    "permute_copy": "permute",
    "scalar_tensor": "tensor",
    "swapaxes": "transpose",
    "swapdims": "transpose",
}
"""Ops that are another one of torch's by what they do."""

OPERATORS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: operator.matmul for name in ("matmul", "mm", "bmm", "mv", "dot")},
    "sub": operator.sub,
    "index": operator.getitem,
}
"""Python's operators on torch2jax's stand-in for a tensor."""


def names() -> list[str]:
    """Returns every overload that lowers."""
    return sorted({*TABLE, *FROM_TORCH2JAX})


def candidate(name: str) -> Callable[..., Any] | None:
    """Returns the torch function or operator under which torch2jax has this op."""
    op = name.split(".")[1]
    op = SAME.get(op, op)
    for module in (torch, torch.nn.functional):
        function = getattr(module, op, None)
        if callable(function) and function in torch2jax.HANDLED_FUNCTIONS:
            return function
    return OPERATORS.get(op)


def shown(function: Callable[..., Any]) -> str:
    """Names a function as its users write it."""
    for module in (operator, torch.nn.functional, torch):
        for name, value in vars(module).items():
            if value is function and not name.startswith("_"):
                short = module.__name__.removeprefix("_")
                return f"`{short.replace('torch.nn.functional', 'F')}.{name}`"
    return f"`{function.__name__}`"


def failure(name: str, function: Callable[..., Any]) -> str | None:
    """Returns which of dew's tests a function of torch2jax's fails; None if none."""
    theirs = own_function(function)
    plain = name.removeprefix("aten.")
    calls = ops_cases.CALLS | ops_cases.second_names()
    unseen = _arguments(name)
    for number in range(len(calls.get(plain, []))):
        unseen -= _passed(name, ops_cases.call(name, number, torch.float32))
        for dtype in ("float32", "bfloat16", "float16"):
            kind = dtype
            try:
                check_values(theirs, name, number, dtype)
                kind = "gradient"
                if dtype == "float32":
                    check_gradients(theirs, name, number)
            except RefusedError:
                continue
            except Exception as error:
                return f"{_verdict(kind, error)} {_call(calls[plain][number])}"
    for number, given in enumerate(ops_cases.DRAWS.get(plain, [])):
        unseen -= _passed(name, given)
        try:
            check_draw(theirs, name, number)
        except Exception as error:
            return f"{_verdict('draw', error)} {_call((*given[0], given[1]))}"
    if plain not in calls and plain not in ops_cases.DRAWS:
        return "torch leaves the result open; dew's is zeros"
    if unseen:
        return f"no test passes {', '.join(sorted(unseen))}"
    return None


def _arguments(name: str) -> set[str]:
    """Returns what an overload takes, less what says where a tensor is stored."""
    taken = {argument.name for argument in overload(name)._schema.arguments}
    return taken - STORAGE


def _passed(name: str, given: tuple[Any, Mapping[str, Any]]) -> set[str]:
    args, kwargs = given
    listed = overload(name)._schema.arguments
    return {a.name for a, _ in zip(listed, args, strict=False)} | {*kwargs}


def _call(case: tuple[Any, ...]) -> str:
    """Writes a case of the tests: a drawn tensor as its shape, a small one in full."""

    def written(value: Any) -> str:
        if isinstance(value, ops_cases.T):
            kind = {"i": "int", "n": "int", "b": "bool"}.get(value.kind[0], "")
            return f"{kind}<{', '.join(map(str, value.shape))}>"
        if isinstance(value, torch.Tensor) and value.numel() > SHOWN:
            return f"<{', '.join(map(str, value.shape))}>"
        if isinstance(value, torch.Tensor):
            return f"tensor({value.tolist()})"
        if isinstance(value, list) and any(not isinstance(x, int) for x in value):
            return f"[{', '.join(map(written, value))}]"
        return str(value).removeprefix("torch.")

    *args, last = case
    named = last if isinstance(last, dict) else {}
    args = args if isinstance(last, dict) else case
    words = [*map(written, args), *(f"{k}={written(v)}" for k, v in named.items())]
    return f"`({', '.join(words)})`"


def _verdict(kind: str, error: Exception) -> str:
    """Says in a few words what a function of torch2jax's did in a test."""
    if isinstance(error, Warning):
        return "warns at"
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    raised_in = frame.tb_frame.f_code.co_filename if frame else ""
    if not isinstance(error, AssertionError) or "torch2jax" in raised_in:
        return "refuses"
    return {"gradient": "another gradient at", "draw": "another distribution at"}.get(
        kind, f"other values in {kind} at"
    )


def operations(name: str, function: Callable[..., Any]) -> Counter[str]:
    """Counts the operations of all cases' graphs, before XLA's passes."""
    counts: Counter[str] = Counter()
    for case, number in ops_cases.cases():
        if case != name:
            continue
        given = ops_cases.call(name, number, torch.float32)
        leaves, tree = pytree.tree_flatten(pytree.tree_map(to_jax, given))
        moved = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def run(
            arrays: list[jax.Array],
            leaves: list[Any] = leaves,
            tree: Any = tree,
            moved: list[int] = moved,
        ) -> Any:
            args, kwargs = pytree.tree_unflatten(
                [
                    arrays[moved.index(i)] if i in moved else x
                    for i, x in enumerate(leaves)
                ],
                tree,
            )
            return on_arrays(function)(*args, **kwargs)

        with torch_arithmetic():
            text = jax.jit(run).lower([leaves[i] for i in moved]).as_text()
        counts.update(re.findall(r"stablehlo\.(\w+)", text))
    return counts


def reason(name: str, function: Callable[..., Any]) -> str | None:
    """Returns why dew's function stays; None where torch2jax's may take its place."""
    fault = failure(name, function)
    if fault is not None or name in FROM_TORCH2JAX:
        return fault
    try:
        more = operations(name, own_function(function)) - operations(
            name, handler(name)
        )
    except Exception as error:
        return f"its graph: {type(error).__name__}"
    return f"its graph has {', '.join(sorted(more))} more" if more else None


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yields the row of every overload of which torch2jax has the op."""
    for name in names():
        function = candidate(name)
        if function is None:
            continue
        why = reason(name, function)
        whose = "torch2jax" if name in FROM_TORCH2JAX else "dew"
        yield f"`{name}`", whose, shown(function), why or ""


def table() -> list[str]:
    """Returns the lines of the table; its last row has what torch2jax lacks."""
    absent = [name for name in names() if candidate(name) is None]
    listed = ", ".join(f"`{name}`" for name in absent)
    last = (f"{len(absent)} more: {listed}", "dew", "none", "")
    return table_lines(COLUMNS, [*rows(), last])


if __name__ == "__main__":
    write_table(PAGE, table())
