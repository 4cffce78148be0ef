"""A torch graph as a list of instructions, read once."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from dew.bridges.lowering.errors import LoweringExportError

Size: TypeAlias = Any
"""An int, or the sympy expression of a length that the caller chooses."""

_IGNORED = frozenset(
    f"aten.{name}"
    for name in (
        "_assert_tensor_metadata.default",
        "_assert_async.msg",
        "_assert_async.default",
        "sym_constrain_range_for_size.default",
        "sym_constrain_range.default",
    )
)
"""Checks of what the interpreter checks itself, or that only live data can fail."""


@dataclass(frozen=True)
class Ref:
    """Stands in an instruction's arguments for a value computed before."""

    name: str


@dataclass(frozen=True)
class Expected:
    """The shape and dtype that torch gave a tensor; None leaves the shape open."""

    shape: tuple[Size, ...] | None
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One call: an ATen overload, or Python arithmetic on lengths.

    `expected` is None for what is no tensor. `held` says that torch computed this under
    `no_grad`, so no gradient flows through it. `origin` is the module and source line.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    expected: Expected | tuple[Expected | None, ...] | None
    origin: str
    held: bool

    def refs(self) -> Iterator[str]:
        """Yields the names of the values this call reads."""
        yield from _refs(self.args)
        yield from _refs(tuple(self.kwargs.values()))


_READING = frozenset(
    f"aten.{name}.default"
    for name in "item _local_scalar_dense nonzero nonzero_numpy masked_select".split()
)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A whole graph.

    `weights` maps a value's name to the parameter or buffer it is, `inputs` lists the
    user's inputs in the order of their flattened tree, `outputs` the results by name
    and `updates` the new values of buffers that the forward moves. Where lengths are
    free, `guards` and `ranges` say for which of them the graph holds.
    """

    weights: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    inputs: Mapping[str, Expected]
    instructions: tuple[Instruction, ...]
    outputs: Mapping[str, Any]
    updates: Mapping[str, Ref]
    guards: tuple[str, ...] = ()
    ranges: Mapping[Any, tuple[float, float]] = field(default_factory=dict)

    def needed(
        self, wanted: Iterable[Any], given: Iterable[str] = ()
    ) -> tuple[Instruction, ...]:
        """Returns the instructions that `wanted` rests on, in order.

        What computes a value in `given` is left out: the caller has it.
        """
        alive, known = set(_refs(tuple(wanted))), set(given)
        kept = []
        for step in reversed(self.instructions):
            if step.name in alive - known:
                kept.append(step)
                alive.update(step.refs())
        return tuple(reversed(kept))

    @property
    def reading(self) -> tuple[Instruction, ...]:
        """The instructions that take numbers or shapes from a tensor's values."""
        wanted = (*self.outputs.values(), *self.updates.values())
        return tuple(s for s in self.needed(wanted) if str(s.target) in _READING)

    def lengths(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[Any, int]:
        """Binds each free length to what the inputs of these shapes have."""
        bound: dict[Any, int] = {}
        for name, expected in self.inputs.items():
            pairs = zip(expected.shape or (), shapes.get(name, ()), strict=False)
            for symbol, length in pairs:
                if isinstance(symbol, sympy.Symbol):
                    bound.setdefault(symbol, length)
        return bound

    def accepts(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Says whether the graph holds for inputs of these shapes."""
        lengths = self.lengths(shapes)
        fits = all(
            len(shapes[name]) == len(expected.shape or ())
            and shapes[name] == sizes(expected.shape or (), lengths)
            for name, expected in self.inputs.items()
        )
        return fits and all(
            low <= lengths.get(symbol, low) <= high
            for symbol, (low, high) in self.ranges.items()
        )


def sizes(shape: tuple[Size, ...], lengths: Mapping[Any, int]) -> tuple[int, ...]:
    """Returns a shape with its free lengths filled in."""
    return tuple(
        n if isinstance(n, int) else int(sympy.sympify(n).xreplace(lengths))
        for n in shape
    )


def _refs(value: Any) -> Iterator[str]:
    match value:
        case Ref(name=name):
            yield name
        case list() | tuple():
            for item in value:
                yield from _refs(item)
        case dict():
            yield from _refs(tuple(value.values()))
        case slice():
            yield from _refs((value.start, value.stop, value.step))


def program_from_export(
    exported: ExportedProgram, names: list[str], *, guards: tuple[str, ...] = ()
) -> Program:
    """Reads an exported program; `names` name its outputs, in their flattened order."""
    reader = _Reader()
    reader.read(exported.graph_module, prefix="", held=False, bound={})
    signature = exported.graph_signature
    weights, constants, inputs = {}, {}, {}
    for spec in signature.input_specs:
        name = spec.arg.name
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            weights[name] = _bare(spec.target)
        elif spec.kind == InputKind.USER_INPUT:
            if name in reader.placeholders:
                inputs[name] = reader.placeholders[name]
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constants[name] = exported.constants[str(spec.target)]
        else:
            raise LoweringExportError(
                f"the graph takes {name}, a {spec.kind.name}, which is neither a "
                "tensor nor a weight; pass it to the module's constructor instead"
            )
    outputs, updates = {}, {}
    results = iter(names)
    for spec, value in zip(signature.output_specs, reader.returned, strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            updates[_bare(spec.target)] = value
        elif spec.kind == OutputKind.USER_OUTPUT:
            outputs[next(results)] = value
    return Program(
        weights=weights,
        constants=constants,
        inputs=inputs,
        instructions=tuple(reader.instructions),
        outputs=outputs,
        updates=updates,
        guards=guards,
        ranges={
            symbol: (float(span.lower), float(span.upper))
            for symbol, span in exported.range_constraints.items()
        },
    )


def _bare(target: str | None) -> str:
    """Strips the name of the wrapper that was exported around the module."""
    return str(target).removeprefix("module.")


@dataclass
class _Reader:
    """Walks a graph module and what it nests, into one flat list."""

    instructions: list[Instruction] = field(default_factory=list)
    placeholders: dict[str, Expected] = field(default_factory=dict)
    returned: tuple[Any, ...] = ()

    def read(
        self,
        module: torch.fx.GraphModule,
        *,
        prefix: str,
        held: bool,
        bound: dict[str, Any],
    ) -> Any:
        """Reads one graph; `bound` holds its inputs if another graph calls it."""
        env: dict[str, Any] = {}
        given = iter(bound.items())
        for node in module.graph.nodes:
            match node.op:
                case "placeholder":
                    env[node.name] = next(given, (node.name, Ref(node.name)))[1]
                    self._note_placeholder(node, prefix)
                case "get_attr":
                    env[node.name] = operator.attrgetter(node.target)(module)
                case "call_function":
                    env[node.name] = self._call(node, env, prefix=prefix, held=held)
                case "output":
                    self.returned = tuple(_resolved(node.args[0], env))
        return self.returned

    def _note_placeholder(self, node: torch.fx.Node, prefix: str) -> None:
        value = node.meta.get("val")
        if not prefix and isinstance(value, torch.Tensor):
            self.placeholders[node.name] = _expected(value)

    def _call(
        self, node: torch.fx.Node, env: dict[str, Any], *, prefix: str, held: bool
    ) -> Any:
        args = _resolved(node.args, env)
        name = str(node.target)
        if name in _IGNORED:
            return None
        if isinstance(node.target, HigherOrderOperator):
            return self._nested(node, name, args, prefix=prefix, held=held)
        assert callable(node.target), node.target
        source = args[0] if args else None
        if node.target is operator.getitem and isinstance(source, tuple):
            return source[args[1]]
        step = Instruction(
            name=prefix + node.name,
            target=node.target,
            args=args,
            kwargs=_resolved(dict(node.kwargs), env),
            expected=_expectation(node),
            origin=_origin(node),
            held=held,
        )
        self.instructions.append(step)
        return Ref(step.name)

    def _nested(
        self, node: torch.fx.Node, name: str, args: Any, *, prefix: str, held: bool
    ) -> tuple[Any, ...]:
        """Inlines the graph that a region of other gradient or autocast mode holds."""
        match name:
            case "wrap_with_set_grad_enabled":
                enabled, body, *inputs = args
                held = held or not enabled
            case "wrap_with_autocast":
                _, _, autocast, _, body, *inputs = args
                if autocast:
                    raise LoweringExportError(
                        f"{_origin(node)} computes under autocast, which a lowered "
                        "graph cannot follow; cast the variables instead"
                    )
            case _:
                raise LoweringExportError(
                    f"{_origin(node)} uses torch's {name}, control flow on data that "
                    "has no counterpart here; write it with torch.where"
                )
        outer = self.returned
        results = self.read(
            body,
            prefix=f"{prefix}{node.name}/",
            held=held,
            bound={str(i): value for i, value in enumerate(inputs)},
        )
        self.returned = outer
        return results


def _resolved(value: Any, env: Mapping[str, Any]) -> Any:
    """Replaces nodes by what they stand for."""
    match value:
        case torch.fx.Node():
            return env[value.name]
        case tuple():
            return tuple(_resolved(item, env) for item in value)
        case list():
            return [_resolved(item, env) for item in value]
        case dict():
            return {key: _resolved(item, env) for key, item in value.items()}
        case slice():
            parts = (value.start, value.stop, value.step)
            return slice(*(_resolved(part, env) for part in parts))
        case _:
            return value


def _expectation(
    node: torch.fx.Node,
) -> Expected | tuple[Expected | None, ...] | None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return _expected(value)
    if isinstance(value, list | tuple):
        # What nobody reads may have any shape: torch's own devices differ there.
        picks = [user for user in node.users if user.target is operator.getitem]
        picked = [pick.args[1] for pick in picks if pick.users]
        read = picked if len(picks) == len(node.users) else range(len(value))
        return tuple(
            _expected(item) if isinstance(item, torch.Tensor) and i in read else None
            for i, item in enumerate(value)
        )
    return None


def _expected(value: torch.Tensor) -> Expected:
    sizes = (n.node.expr if isinstance(n, torch.SymInt) else n for n in value.shape)
    return Expected(tuple(sizes), value.dtype)


def _origin(node: torch.fx.Node) -> str:
    """Says which submodule and which line of source a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    where = "the module itself"
    if stack:
        path, kind = stack[-1]
        kind = kind if isinstance(kind, str) else kind.__name__
        path = str(path).removeprefix("L['self'].").removeprefix("module.")
        where = f"{path} ({kind.rsplit('.', 1)[-1]})"
    lines = [
        line.strip()
        for line in (node.meta.get("stack_trace") or "").splitlines()
        if line.strip().startswith("File ")
    ]
    if not lines:
        return where
    file, line, *_ = lines[-1].removeprefix("File ").split(", ")
    short = file.strip('"').rsplit("site-packages/", 1)[-1].rsplit("/", 2)
    return f"{where}, {'/'.join(short[-2:])}:{line.removeprefix('line ')}"


def renamed(program: Program, aliases: Mapping[str, str]) -> Program:
    """Returns the program with each weight under the one name its tensor goes by."""
    return replace(
        program,
        weights={value: aliases[name] for value, name in program.weights.items()},
        updates={aliases[name]: ref for name, ref in program.updates.items()},
    )
