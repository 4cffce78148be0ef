"""Runs a program through torch2jax: the one file that imports it.

torch2jax dispatches every torch call to the JAX function registered for it. The
program's overloads are registered with its own hook, `torch2jax.implements`, and the
program then runs inside `torch2jax.t2j`, so that ops of torch2jax or a user take part.
The overloads in `FROM_TORCH2JAX` run functions of torch2jax, all others those of dew.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch
import torch2jax
from jax import Array
from torch._ops import OpOverload

from dew.bridges.dtypes import jax_dtype
from dew.bridges.lowering.errors import LoweringShapeError, MissingOpsError
from dew.bridges.lowering.graph import Expected, Instruction, Program, Ref, sizes
from dew.bridges.lowering.lock import TRACING
from dew.bridges.lowering.ops import FROM_TORCH2JAX, is_random, torch_arithmetic
from dew.bridges.lowering.ops.register import find
from dew.bridges.lowering.ops.sizes import COUNTING

STORAGE = frozenset(
    "device layout pin_memory memory_format requires_grad non_blocking copy generator "
    "out".split()
)
"""Keywords about storage, which no op of the table receives."""
_registered: set[OpOverload] = set()


def register(instructions: Sequence[Instruction]) -> None:
    """Registers with torch2jax every op of the instructions that it lacks.

    Raises:
        MissingOpsError: an op has no implementation; all such ops are named.
    """
    missing: dict[str, list[str]] = {}
    for step in instructions:
        if not isinstance(step.target, OpOverload):
            continue
        if (
            step.target in torch2jax.HANDLED_FUNCTIONS
            and step.target not in _registered
        ):
            continue
        name = str(step.target)
        if find(name) is None and name not in FROM_TORCH2JAX:
            missing.setdefault(name, []).append(step.origin)
        elif step.target not in _registered:
            _registered.add(step.target)
            torch2jax.implements(step.target, Torchishify_output=False)(handler(name))
    if missing:
        raise MissingOpsError(_missing_ops_message(missing))


def _missing_ops_message(missing: Mapping[str, list[str]]) -> str:
    rows = "\n".join(
        f"  {name} x {len(origins)}, first in {origins[0]}"
        for name, origins in sorted(missing.items())
    )
    name = min(missing)
    return (
        f"{len(missing)} torch ops of this module have no JAX counterpart:\n{rows}\n"
        "Register each before lowering, as in\n"
        f"  @dew.bridges.implements(torch.ops.{name})\n"
        f"  def op(...):  # the arguments of {name}, with jax arrays for tensors\n"
        "      return ..."
    )


def handler(name: str) -> Callable[..., Any]:
    """Returns what torch2jax calls for an overload, on its stand-ins for tensors.

    A function registered with `dew.bridges.implements` precedes all others.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key not in STORAGE}
        op = find(name)
        if op is None:
            return own_function(FROM_TORCH2JAX[name])(*args, **kwargs)
        kwargs = {key: _unwrap(value) for key, value in kwargs.items()}
        if is_random(name, args, kwargs):
            kwargs["rng"] = torch2jax.mk_rng()
        return _wrap(op(*(_unwrap(value) for value in args), **kwargs))

    return call


def own_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch2jax's implementation of a torch function or a Python operator.

    An operator is its own: torch2jax's stand-in for a tensor defines it.
    """
    return torch2jax.HANDLED_FUNCTIONS.get(function, function)


def _unwrap(value: Any) -> Any:
    match value:
        case torch2jax.Torchish():
            return value.value
        case torch.dtype():
            return jax_dtype(value)
        case list() | tuple():
            return [_unwrap(item) for item in value]
        case _:
            return value


def _wrap(value: Any) -> Any:
    if isinstance(value, Array):
        return torch2jax.Torchish(value)
    if isinstance(value, list | tuple):
        return [_wrap(item) for item in value]
    return value


def needs_key(instructions: Sequence[Instruction]) -> bool:
    """Whether any of the instructions draws random numbers."""
    return any(is_random(str(s.target), s.args, dict(s.kwargs)) for s in instructions)


def evaluate(
    program: Program,
    instructions: Sequence[Instruction],
    refs: Sequence[object],
    leaves: Mapping[str, Array],
    rng: Array | None,
) -> list[Array]:
    """Computes the referenced values from `leaves`: weights, constants and inputs.

    Pure and traceable: every value is a function of `leaves` and `rng`.

    Raises:
        LoweringShapeError: an op returned another shape than torch's.
    """
    lengths = program.lengths({name: leaf.shape for name, leaf in leaves.items()})
    last_use = {
        name: number for number, step in enumerate(instructions) for name in step.refs()
    }
    results = {ref.name for ref in refs if isinstance(ref, Ref)}
    outputs: list[Array] = []

    def body(given: Mapping[str, Any]) -> Any:
        values = dict(given)
        for number, step in enumerate(instructions):
            args = _substitute(step.args, values)
            target = COUNTING.get(step.target, step.target)
            out = target(*args, **_substitute(dict(step.kwargs), values))
            values[step.name] = _check_result(step, out, lengths)
            for name in step.refs():
                # Freed at once: outside jit a graph's values would all stay in memory.
                if last_use[name] == number and name not in results:
                    values.pop(name, None)
        outputs.extend(_unwrap(_substitute(list(refs), values)))
        # t2j returns one tensor; the results leave through `outputs`.
        return next(iter(given.values()))

    with TRACING, torch_arithmetic():
        traced: Any = torch2jax.t2j(body)
        traced(dict(leaves), rng=rng)
    return outputs


def _substitute(value: Any, values: Mapping[str, Any]) -> Any:
    match value:
        case Ref(name=name):
            return values[name]
        case tuple():
            return tuple(_substitute(item, values) for item in value)
        case list():
            return [_substitute(item, values) for item in value]
        case dict():
            return {key: _substitute(item, values) for key, item in value.items()}
        case slice():
            parts = (value.start, value.stop, value.step)
            return slice(*(_substitute(part, values) for part in parts))
        case _:
            return value


def _check_result(step: Instruction, out: Any, lengths: Mapping[Any, int]) -> Any:
    match step.expected:
        case None:
            return out
        case tuple() as many:
            pairs = zip(many, out, strict=True)
            return [x if e is None else _cast(step, e, x, lengths) for e, x in pairs]
        case one:
            return _cast(step, one, out, lengths)


def _cast(
    step: Instruction, expected: Expected, out: Any, lengths: Mapping[Any, int]
) -> Any:
    """Casts a result to its dtype in torch, and checks that it has torch's shape."""
    value = out.value
    want = None if expected.shape is None else sizes(expected.shape, lengths)
    if want is not None and value.shape != want:
        raise LoweringShapeError(
            f"{step.target} in {step.origin} must give shape {want} as in torch, got "
            f"{value.shape}; if the op is one you registered, correct it"
        )
    value = jax.lax.convert_element_type(value, jax_dtype(expected.dtype))
    return torch2jax.Torchish(jax.lax.stop_gradient(value) if step.no_grad else value)
