"""Runs a program through torch2jax: the one file that imports it.

torch2jax sends every torch call to the JAX function registered for it. The program's
overloads are registered with its own hook, `torch2jax.implements`, and the program then
runs inside `torch2jax.t2j`, so that whatever its table or a user adds takes part.
"""

from collections.abc import Mapping, Sequence
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
from dew.bridges.lowering.ops import draws, torch_arithmetic
from dew.bridges.lowering.ops.register import find
from dew.bridges.lowering.ops.sizes import COUNTING

_STORAGE = frozenset(
    "device layout pin_memory memory_format requires_grad non_blocking copy generator "
    "out".split()
)
_ours: set[OpOverload] = set()


def register(instructions: Sequence[Instruction]) -> None:
    """Gives torch2jax every op that the instructions call and it does not know.

    Raises:
        MissingOpsError: some op is in no table; all of them are named.
    """
    missing: dict[str, list[str]] = {}
    for step in instructions:
        if not isinstance(step.target, OpOverload):
            continue
        if step.target in torch2jax.HANDLED_FUNCTIONS and step.target not in _ours:
            continue
        if find(str(step.target)) is None:
            missing.setdefault(str(step.target), []).append(step.origin)
        elif step.target not in _ours:
            _ours.add(step.target)
            torch2jax.implements(step.target, Torchishify_output=False)(
                _handler(step.target)
            )
    if missing:
        raise MissingOpsError(_missing(missing))


def _missing(missing: Mapping[str, list[str]]) -> str:
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


def _handler(overload: OpOverload) -> Any:
    name = str(overload)

    def call(*args: Any, **kwargs: Any) -> Any:
        op = find(name)
        assert op is not None, name
        kwargs = {
            key: _unwrapped(value)
            for key, value in kwargs.items()
            if key not in _STORAGE
        }
        if draws(name, args, kwargs):
            kwargs["rng"] = torch2jax.mk_rng()
        return _wrapped(op(*(_unwrapped(value) for value in args), **kwargs))

    return call


def _unwrapped(value: Any) -> Any:
    match value:
        case torch2jax.Torchish():
            return value.value
        case torch.dtype():
            return jax_dtype(value)
        case list() | tuple():
            return [_unwrapped(item) for item in value]
        case _:
            return value


def _wrapped(value: Any) -> Any:
    if isinstance(value, Array):
        return torch2jax.Torchish(value)
    if isinstance(value, list | tuple):
        return [_wrapped(item) for item in value]
    return value


def needs_key(instructions: Sequence[Instruction]) -> bool:
    """Says whether any instruction draws random numbers."""
    return any(draws(str(s.target), s.args, dict(s.kwargs)) for s in instructions)


def evaluate(
    program: Program,
    instructions: Sequence[Instruction],
    wanted: Sequence[Any],
    leaves: Mapping[str, Array],
    rng: Array | None,
) -> list[Any]:
    """Computes `wanted` from the values in `leaves`: weights, constants and inputs.

    Pure, and traceable: every value is a function of `leaves` and `rng`.
    """
    lengths = program.lengths({name: leaf.shape for name, leaf in leaves.items()})
    last_use = {
        name: number for number, step in enumerate(instructions) for name in step.refs()
    }
    kept = {ref.name for ref in wanted if isinstance(ref, Ref)}
    found: list[Any] = []

    def body(given: Mapping[str, Any]) -> Any:
        values = dict(given)
        for number, step in enumerate(instructions):
            args = _filled(step.args, values)
            target = COUNTING.get(step.target, step.target)
            out = target(*args, **_filled(dict(step.kwargs), values))
            values[step.name] = _checked(step, out, lengths)
            for name in step.refs():
                if last_use[name] == number and name not in kept:
                    values.pop(name, None)
        found.extend(_unwrapped(_filled(list(wanted), values)))
        # t2j returns one tensor; the others leave through `found`.
        return next(iter(given.values()))

    with TRACING, torch_arithmetic():
        traced: Any = torch2jax.t2j(body)
        traced(dict(leaves), rng=rng)
    return found


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    match value:
        case Ref(name=name):
            return values[name]
        case tuple():
            return tuple(_filled(item, values) for item in value)
        case list():
            return [_filled(item, values) for item in value]
        case dict():
            return {key: _filled(item, values) for key, item in value.items()}
        case slice():
            parts = (value.start, value.stop, value.step)
            return slice(*(_filled(part, values) for part in parts))
        case _:
            return value


def _checked(step: Instruction, out: Any, lengths: Mapping[Any, int]) -> Any:
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
    """Gives the result the dtype torch gave it, and holds its shape to torch's."""
    value = out.value
    want = None if expected.shape is None else sizes(expected.shape, lengths)
    if want is not None and value.shape != want:
        raise LoweringShapeError(
            f"{step.target} in {step.origin} must give shape {want} as in torch, got "
            f"{value.shape}; if the op is one you registered, correct it"
        )
    value = jax.lax.convert_element_type(value, jax_dtype(expected.dtype))
    return torch2jax.Torchish(jax.lax.stop_gradient(value) if step.held else value)
