"""Exports a torch module to a `Program`, with trunk and blocks captured."""

import contextlib
import copy
import inspect
import io
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from jaxtyping import PyTree
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from dew.bridges.lowering.errors import LoweringError, LoweringExportError
from dew.bridges.lowering.graph import Program, program_from_export, rename_weights
from dew.bridges.lowering.lock import TRACING
from dew.bridges.names import aliases

FINAL, BLOCK = "final", "block."
"""Names of the captured values; the module's own outputs keep their names."""

_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of an export: torch's own, sympy's, and those of the module's forward."""


@dataclass(frozen=True, kw_only=True)
class CapturePoints:
    """Names of a module's output embedding, base model and block list, None if absent.

    The trunk ends where `head` begins, or without a head where `trunk` ends.
    """

    head: str | None
    trunk: str | None
    blocks: str | None


def capture_points(module: torch.nn.Module, blocks: str | None = None) -> CapturePoints:
    """Finds the output embedding, the base model and the list of blocks.

    Raises:
        ValueError: there is no submodule named `blocks`.
    """
    names = {id(child): name for name, child in module.named_modules()}
    embedding = _transformers_attribute(module, "get_output_embeddings")
    head = names.get(id(embedding)) if embedding is not None else None
    base = vars(type(module)).get("base_model_prefix") or _transformers_attribute(
        module, "base_model"
    )
    trunk = base if isinstance(base, str) else names.get(id(base))
    submodules = dict(module.named_modules())
    if blocks is not None and blocks not in submodules:
        raise ValueError(
            f"{type(module).__name__} has no submodule {blocks!r} to take blocks from"
        )
    return CapturePoints(
        head=head,
        trunk=trunk if trunk in submodules and trunk else None,
        blocks=blocks or _blocks(module),
    )


def _transformers_attribute(module: torch.nn.Module, name: str) -> Any:
    """Returns the value of a transformers method or property, None if it has none."""
    # Static, as `getattr` on a module searches its submodules too.
    member = inspect.getattr_static(module, name, None)
    match member:
        case None:
            return None
        case property():
            return member.fget(module) if member.fget else None
        case _:
            return member.__get__(module)()


def _blocks(module: torch.nn.Module) -> str | None:
    """Names the longest list of like submodules, a decoder's before an encoder's."""
    lists = [
        (path, children)
        for path, children in module.named_modules()
        if isinstance(children, torch.nn.ModuleList)
        and len(children)
        and len({type(child) for child in children}) == 1
        and any(child.children() for child in children)
    ]
    outer = [
        (path, children)
        for path, children in lists
        if not any(path.startswith(f"{other}.") for other, _ in lists)
    ]
    ranked = sorted(outer, key=lambda item: ("decoder" not in item[0], -len(item[1])))
    return ranked[0][0] if ranked else None


class Capture(torch.nn.Module):
    """Wraps a module: inputs as one dict, outputs as one dict with captured values."""

    def __init__(self, module: torch.nn.Module, points: CapturePoints) -> None:
        super().__init__()
        self.module = module
        self.points = points
        self.fixed = fixed_arguments(module)

    def forward(self, inputs: dict[str, PyTree]) -> dict[str, torch.Tensor]:
        """Returns the module's tensors by name, then the captured ones."""
        captured: dict[str, torch.Tensor] = {}
        with _hooks(self.module, self.points, captured):
            returned = self.module(**inputs, **self.fixed)
        return dict(_tensors(returned)) | captured


def fixed_arguments(module: torch.nn.Module) -> dict[str, bool]:
    """Returns the switches that make a transformers forward return named tensors."""
    parameters = inspect.signature(module.forward).parameters
    switches = {"use_cache": False, "return_dict": True}
    return {name: value for name, value in switches.items() if name in parameters}


def _tensors(returned: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that a forward returned, by name; caches are skipped."""
    if isinstance(returned, torch.Tensor):
        yield "output", returned
    else:
        yield from _named_tensors(_parts(returned), "")


def _named_tensors(
    parts: Iterable[tuple[str, Any]], prefix: str
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in parts:
        if isinstance(value, torch.Tensor):
            yield prefix + name, value
        else:
            yield from _named_tensors(_parts(value), f"{prefix}{name}.")


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Returns the entries of a mapping, sequence or dataclass, by name or index."""
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [(str(i), part) for i, part in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return []


@contextlib.contextmanager
def _hooks(
    module: torch.nn.Module,
    points: CapturePoints,
    captured: dict[str, torch.Tensor],
) -> Iterator[None]:
    """Captures the head's input and every block's output while the module runs.

    A recurrent layer that is given a packed sequence raises a LoweringError.
    """

    def block(_: Any, __: Any, output: Any) -> None:
        first = output if isinstance(output, torch.Tensor) else output[0]
        count = sum(name.startswith(BLOCK) for name in captured)
        captured[f"{BLOCK}{count}"] = first

    def head(_: Any, args: Any) -> None:
        captured[FINAL] = args[0]

    def trunk(_: Any, __: Any, output: Any) -> None:
        first = output if isinstance(output, torch.Tensor) else output[0]
        captured.setdefault(FINAL, first)

    recurrent = [m for m in module.modules() if isinstance(m, torch.nn.RNNBase)]
    handles = [layer.register_forward_pre_hook(_refuse_packed) for layer in recurrent]
    if points.head is not None:
        embedding = module.get_submodule(points.head)
        handles.append(embedding.register_forward_pre_hook(head))
    elif points.trunk is not None:
        handles.append(module.get_submodule(points.trunk).register_forward_hook(trunk))
    if points.blocks is not None:
        for child in module.get_submodule(points.blocks).children():
            handles.append(child.register_forward_hook(block))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_packed(_: Any, args: Any) -> None:
    if args and isinstance(args[0], PackedSequence):
        raise LoweringError(
            "a PackedSequence has no counterpart in JAX, where shapes are fixed: give "
            "the layer padded rows, and read the states of real positions"
        )


def meta_copy(
    module: torch.nn.Module,
    dtypes: Mapping[str, torch.dtype],
    device: str | None = None,
) -> torch.nn.Module:
    """Copies a module without its weights' values, in the dtypes given by name.

    Storage is reserved and never touched, so it costs address space alone. A module
    with a parameter on the meta device is put there entirely, unless `device` names
    another. Attributes that are neither parameters nor buffers are copied deeply.
    """
    if device is None and any(weight.is_meta for weight in module.parameters()):
        device = "meta"

    def empty_copy(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(
            tensor.detach(),
            dtype=dtypes.get(name, tensor.dtype),
            device=device or tensor.device,
        )

    memo: dict[int, Any] = {
        id(buffer): empty_copy(name, buffer) for name, buffer in module.named_buffers()
    }
    for name, weight in module.named_parameters():
        memo[id(weight)] = torch.nn.Parameter(
            empty_copy(name, weight), requires_grad=weight.requires_grad
        )
    return copy.deepcopy(module, memo)


def export(
    module: torch.nn.Module,
    inputs: Mapping[str, PyTree],
    points: CapturePoints,
    *,
    train: bool,
    dynamic: bool,
) -> Program:
    """Exports a module at the shapes of `inputs`, or with `dynamic` of any such shapes.

    The module is left in the mode that `train` sets.

    Raises:
        LoweringExportError: torch cannot make one graph of it, or cannot remove the
            graph's mutations, or the graph would contain a fixed random mask.
    """
    if train:
        _refuse_frozen_masks(module)
    module.train(train)
    wrapper = Capture(module, points)
    shapes = pytree.tree_map(_free_axes, dict(inputs)) if dynamic else None
    try:
        with TRACING, warnings.catch_warnings(), _stderr_on_success():
            # Torch's own copy of a tree spec warns of torch's own deprecation.
            warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
            # A recurrent layer lists its parameters anew; they are parameters still.
            warnings.filterwarnings("ignore", ".*_flat_weights", UserWarning)
            # Not strict: the module's Python runs as it is, so that hooks, dataclass
            # outputs and transformers' own decorators need no bytecode analysis.
            exported = torch.export.export(
                wrapper,
                (dict(inputs),),
                strict=False,
                dynamic_shapes=None if shapes is None else (shapes,),
            )
            # Decomposing makes the graph functional. It is done only where needed, as
            # it also splits ops that have one JAX implementation.
            if _mutates(exported):
                exported = exported.run_decompositions({})
    except _FAULTS as fault:
        raise LoweringExportError(_export_message(module, fault)) from fault
    program = program_from_export(
        exported,
        _output_names(exported),
        # The private list is the only place that holds the branches torch took.
        guards=tuple(exported._guards_code) if dynamic else (),  # pyright: ignore[reportPrivateUsage]
    )
    # After the export: torch represents such numbers by symbols, which only the
    # instructions that an output depends on make a fault.
    if program.data_dependent:
        listed = "".join(
            f"\n  {s.target} in {s.origin}" for s in program.data_dependent
        )
        raise LoweringExportError(
            f"{type(module).__name__} reads numbers out of tensors, which no compiled "
            f"graph can:{listed}\nKeep it in torch as a live teacher"
        )
    return rename_weights(program, aliases(module))


@contextlib.contextmanager
def _stderr_on_success() -> Iterator[None]:
    """Buffers stderr, and drops it if the export fails.

    Torch prints the whole graph then, which adds nothing to the error.
    """
    with contextlib.redirect_stderr(io.StringIO()) as captured:
        yield
    sys.stderr.write(captured.getvalue())


def _refuse_frozen_masks(module: torch.nn.Module) -> None:
    """Refuses SpecAugment: numpy draws its masks, and a graph would keep the first."""
    config = vars(module).get("config")
    fields = config.to_dict() if config is not None else {}
    rates = [fields.get(f"mask_{axis}_prob") for axis in ("time", "feature")]
    if fields.get("apply_spec_augment") and any(rates):
        raise LoweringExportError(
            f"{type(module).__name__} draws SpecAugment's masks in numpy while it "
            "trains (mask_time_prob, mask_feature_prob are "
            f"{', '.join(map(str, rates))}), and a graph would keep the first ones for "
            "good; set config.apply_spec_augment = False, and mask the inputs yourself"
        )


def _free_axes(tensor: torch.Tensor) -> dict[int, Any]:
    """Frees the batch axis and, of integer inputs, the length; not image sizes."""
    token_like = not tensor.dtype.is_floating_point
    return {axis: Dim.AUTO for axis in range(min(tensor.ndim, 2 if token_like else 1))}


def _output_names(exported: ExportedProgram) -> list[str]:
    spec = exported.call_spec.out_spec
    assert spec is not None
    return list(pytree.tree_unflatten(range(spec.num_leaves), spec))


def _mutates(exported: ExportedProgram) -> bool:
    return any(
        isinstance(node.target, OpOverload)
        and (
            node.target._schema.is_mutable  # pyright: ignore[reportPrivateUsage]
            # It updates its running statistics, although its schema is not mutable.
            or (node.target == torch.ops.aten.batch_norm.default and node.args[5])
        )
        for graph in exported.graph_module.modules()
        if isinstance(graph, torch.fx.GraphModule)
        for node in graph.graph.nodes
    )


def _export_message(module: torch.nn.Module, fault: BaseException) -> str:
    """Returns where in the module's source the export stopped, and what to try."""
    frames = traceback.extract_tb(fault.__traceback__)
    own = [frame for frame in frames if "/torch/" not in frame.filename]
    last = own[-1] if own else frames[-1]
    short = "/".join(last.filename.rsplit("/", 2)[-2:])
    first_line = next(iter(str(fault).strip().splitlines()), type(fault).__name__)
    message = (
        f"torch.export cannot make one graph of {type(module).__name__}: it stops at "
        f"{short}:{last.lineno}, `{last.line}`: {first_line}"
    )
    if (
        "data-dependent" in str(fault).lower()
        or "DataDependent" in type(fault).__name__
    ):
        message += (
            "\nThat line branches on the values of a tensor, which no compiled graph "
            'can. Try a config without rope_type="dynamic"; for a mixture of experts '
            'config._experts_implementation = "grouped_mm" or "batched_mm"; for '
            "training, layerdrop 0; or keep the model in torch as a live teacher"
        )
    return message
