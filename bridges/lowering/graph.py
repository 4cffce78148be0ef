"""The intermediate form of a lowered module: a flat list of ATen instructions."""

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
"""An int, or the sympy expression of a free length, which the inputs determine."""

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
"""Assertions left out: the interpreter checks shapes, and values are not known."""


@dataclass(frozen=True)
class Ref:
    """A reference, in an instruction's arguments, to a value computed before."""

    name: str


@dataclass(frozen=True)
class Expected:
    """The shape and dtype of a tensor in torch; a shape of None is not checked."""

    shape: tuple[Size, ...] | None
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One call: an ATen overload, or Python arithmetic on lengths.

    `expected` is None for a result that is not a tensor. `no_grad` is true where torch
    computed it without gradients, so none may flow through. `origin` is the submodule
    and source line.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    expected: Expected | tuple[Expected | None, ...] | None
    origin: str
    no_grad: bool

    def refs(self) -> Iterator[str]:
        """Yields the names of the values that this call reads."""
        yield from _refs(self.args)
        yield from _refs(tuple(self.kwargs.values()))


_DATA_DEPENDENT = frozenset(
    f"aten.{name}.default"
    for name in "item _local_scalar_dense nonzero nonzero_numpy masked_select".split()
)
"""Ops whose result, or its shape, depends on the values of a tensor."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The whole graph of one module, in one mode and for one set of dtypes.

    `weights` maps names of values to the names of parameters and buffers, `inputs`
    lists the user's inputs in the order of their flattened tree, `outputs` the results
    by name and `updates` the new values of buffers that the forward pass updates. Where
    lengths are free, `guards` (Python conditions on shapes, as torch.export writes
    them) and `ranges` (bounds of each free length) limit where the graph is valid.
    """

    weights: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    inputs: Mapping[str, Expected]
    instructions: tuple[Instruction, ...]
    outputs: Mapping[str, Any]
    updates: Mapping[str, Ref]
    guards: tuple[str, ...] = ()
    ranges: Mapping[Any, tuple[float, float]] = field(default_factory=dict)

    def dependencies(
        self, values: Iterable[object], given: Iterable[str] = ()
    ) -> tuple[Instruction, ...]:
        """Returns the instructions that `values` depend on, in order.

        Names in `given` are taken as computed, and so is all that only they depend on.
        """
        alive, computed = set(_refs(tuple(values))), set(given)
        steps = []
        # Backwards, so that each value's readers are visited before its producer.
        for step in reversed(self.instructions):
            if step.name in alive - computed:
                steps.append(step)
                alive.update(step.refs())
        return tuple(reversed(steps))

    @property
    def data_dependent(self) -> tuple[Instruction, ...]:
        """The instructions whose result or shape depends on a tensor's values."""
        values = (*self.outputs.values(), *self.updates.values())
        return tuple(
            s for s in self.dependencies(values) if str(s.target) in _DATA_DEPENDENT
        )

    def lengths(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[sympy.Symbol, int]:
        """Returns the value of each free length for inputs of these shapes."""
        bound: dict[sympy.Symbol, int] = {}
        for name, expected in self.inputs.items():
            pairs = zip(expected.shape or (), shapes.get(name, ()), strict=False)
            for symbol, length in pairs:
                if isinstance(symbol, sympy.Symbol):
                    bound.setdefault(symbol, length)
        return bound

    def accepts(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the graph's shapes and ranges admit inputs of these shapes."""
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


def sizes(
    shape: tuple[Size, ...], lengths: Mapping[sympy.Symbol, int]
) -> tuple[int, ...]:
    """Evaluates a shape whose sizes may be expressions of free lengths."""
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
    """Converts a program of torch.export; `names` are its outputs', as flattened.

    Raises:
        LoweringExportError: the graph takes an object that is neither a tensor nor a
            weight, or has control flow or autocast inside.
    """
    reader = _Reader()
    reader.read(exported.graph_module, prefix="", no_grad=False, bound={})
    signature = exported.graph_signature
    weights, constants, inputs = {}, {}, {}
    for spec in signature.input_specs:
        name = spec.arg.name
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            weights[name] = _strip_wrapper(spec.target)
        elif spec.kind == InputKind.USER_INPUT:
            # An input that is not a tensor is a constant of the graph.
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
    # Export returns updated buffers before what the module returns; `names` are of the
    # latter alone.
    results = iter(names)
    for spec, value in zip(signature.output_specs, reader.returned, strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            updates[_strip_wrapper(spec.target)] = value
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


def _strip_wrapper(target: str | None) -> str:
    """Strips the name of the wrapper that was exported around the module."""
    return str(target).removeprefix("module.")


@dataclass
class _Reader:
    """Walks a graph module and the graphs nested in it, into one flat list."""

    instructions: list[Instruction] = field(default_factory=list)
    placeholders: dict[str, Expected] = field(default_factory=dict)
    returned: tuple[Any, ...] = ()

    def read(
        self,
        module: torch.fx.GraphModule,
        *,
        prefix: str,
        no_grad: bool,
        bound: dict[str, Any],
    ) -> Any:
        """Reads one graph; `bound` holds the inputs of a nested one, by position."""
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
                    env[node.name] = self._call(
                        node, env, prefix=prefix, no_grad=no_grad
                    )
                case "output":
                    self.returned = tuple(_resolve(node.args[0], env))
        return self.returned

    def _note_placeholder(self, node: torch.fx.Node, prefix: str) -> None:
        value = node.meta.get("val")
        if not prefix and isinstance(value, torch.Tensor):
            self.placeholders[node.name] = _tensor_spec(value)

    def _call(
        self, node: torch.fx.Node, env: dict[str, Any], *, prefix: str, no_grad: bool
    ) -> Any:
        args = _resolve(node.args, env)
        name = str(node.target)
        if name in _IGNORED:
            return None
        if isinstance(node.target, HigherOrderOperator):
            return self._inline(node, name, args, prefix=prefix, no_grad=no_grad)
        assert callable(node.target), node.target
        source = args[0] if args else None
        # The results of an inlined graph are a tuple of references already, so taking
        # one of them is no instruction.
        if node.target is operator.getitem and isinstance(source, tuple):
            return source[args[1]]
        step = Instruction(
            name=prefix + node.name,
            target=node.target,
            args=args,
            kwargs=_resolve(dict(node.kwargs), env),
            expected=_expected_result(node),
            origin=_origin(node),
            no_grad=no_grad,
        )
        self.instructions.append(step)
        return Ref(step.name)

    def _inline(
        self, node: torch.fx.Node, name: str, args: Any, *, prefix: str, no_grad: bool
    ) -> tuple[Any, ...]:
        """Inlines the graph of a region with its own gradient or autocast mode."""
        match name:
            case "wrap_with_set_grad_enabled":
                enabled, body, *inputs = args
                no_grad = no_grad or not enabled
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
            no_grad=no_grad,
            bound={str(i): value for i, value in enumerate(inputs)},
        )
        self.returned = outer
        return results


def _resolve(value: Any, env: Mapping[str, Any]) -> Any:
    """Replaces each node, at any depth, by its value in `env`."""
    match value:
        case torch.fx.Node():
            return env[value.name]
        case tuple():
            return tuple(_resolve(item, env) for item in value)
        case list():
            return [_resolve(item, env) for item in value]
        case dict():
            return {key: _resolve(item, env) for key, item in value.items()}
        case slice():
            parts = (value.start, value.stop, value.step)
            return slice(*(_resolve(part, env) for part in parts))
        case _:
            return value


def _expected_result(
    node: torch.fx.Node,
) -> Expected | tuple[Expected | None, ...] | None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return _tensor_spec(value)
    if isinstance(value, list | tuple):
        # Results that are never read may have any shape: torch's own devices differ
        # there.
        items = [user for user in node.users if user.target is operator.getitem]
        indices = [item.args[1] for item in items if item.users]
        read = indices if len(items) == len(node.users) else range(len(value))
        return tuple(
            _tensor_spec(item) if isinstance(item, torch.Tensor) and i in read else None
            for i, item in enumerate(value)
        )
    return None


def _tensor_spec(value: torch.Tensor) -> Expected:
    sizes = (n.node.expr if isinstance(n, torch.SymInt) else n for n in value.shape)
    return Expected(tuple(sizes), value.dtype)


def _origin(node: torch.fx.Node) -> str:
    """Returns the submodule and the line of source that a node comes from."""
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


def rename_weights(program: Program, aliases: Mapping[str, str]) -> Program:
    """Returns the program with tied weights under the first of their names."""
    return replace(
        program,
        weights={value: aliases[name] for value, name in program.weights.items()},
        updates={aliases[name]: ref for name, ref in program.updates.items()},
    )
