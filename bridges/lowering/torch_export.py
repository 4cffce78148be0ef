"""A torch module to a `Program`: `torch.export`, with trunk and blocks marked."""

import contextlib
import copy
import inspect
import io
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from dew.bridges.lowering.errors import LoweringExportError
from dew.bridges.lowering.graph import Program, program_from_export, renamed
from dew.bridges.lowering.lock import TRACING
from dew.bridges.names import aliases

FINAL, BLOCK = "final", "block."
"""Names of the marked values; what the module itself returns is under its own names."""


_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What an export raises: torch's own errors, sympy's, and the module's."""


@dataclass(frozen=True, kw_only=True)
class CapturePoints:
    """Where a module's trunk ends and its blocks are; None where it has none."""

    head: str | None
    trunk: str | None
    blocks: str | None


def marks(module: torch.nn.Module, blocks: str | None = None) -> CapturePoints:
    """Finds the output embedding, the base model and the list of blocks."""
    names = {id(child): name for name, child in module.named_modules()}
    embedding = _asked(module, "get_output_embeddings")
    head = names.get(id(embedding)) if embedding is not None else None
    base = vars(type(module)).get("base_model_prefix") or _asked(module, "base_model")
    trunk = base if isinstance(base, str) else names.get(id(base))
    known = dict(module.named_modules())
    if blocks is not None and blocks not in known:
        raise ValueError(
            f"{type(module).__name__} has no submodule {blocks!r} to take blocks from"
        )
    return CapturePoints(
        head=head,
        trunk=trunk if trunk in known and trunk else None,
        blocks=blocks or _blocks(module),
    )


def _asked(module: torch.nn.Module, name: str) -> Any:
    """Returns what a transformers method or property of that name says, else None."""
    found = inspect.getattr_static(module, name, None)
    match found:
        case None:
            return None
        case property():
            return found.fget(module) if found.fget else None
        case _:
            return found.__get__(module)()


def _blocks(module: torch.nn.Module) -> str | None:
    """Names the longest list of like submodules, a decoder's before an encoder's."""
    found = [
        (path, children)
        for path, children in module.named_modules()
        if isinstance(children, torch.nn.ModuleList)
        and len(children)
        and len({type(child) for child in children}) == 1
        and any(child.children() for child in children)
    ]
    outer = [
        (path, children)
        for path, children in found
        if not any(path.startswith(f"{other}.") for other, _ in found)
    ]
    ranked = sorted(outer, key=lambda item: ("decoder" not in item[0], -len(item[1])))
    return ranked[0][0] if ranked else None


class Capture(torch.nn.Module):
    """Calls a module by keywords and returns its tensors, marked ones included."""

    def __init__(self, module: torch.nn.Module, where: CapturePoints) -> None:
        super().__init__()
        self.module = module
        self.where = where
        self.fixed = fixed_arguments(module)

    def forward(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Returns the module's tensors by name, then the marked ones."""
        marked: dict[str, torch.Tensor] = {}
        with _hooks(self.module, self.where, marked):
            returned = self.module(**inputs, **self.fixed)
        return dict(_tensors(returned)) | marked


def fixed_arguments(module: torch.nn.Module) -> dict[str, bool]:
    """Returns the switches that a forward of tensors alone needs: no cache, by name."""
    takes = inspect.signature(module.forward).parameters
    wanted = {"use_cache": False, "return_dict": True}
    return {name: value for name, value in wanted.items() if name in takes}


def _tensors(returned: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of whatever a forward returns, by name; caches are skipped."""
    match returned:
        case torch.Tensor():
            yield "output", returned
        case Mapping():
            items = returned.items()
            yield from _named(items)
        case list() | tuple():
            yield from _named((str(i), item) for i, item in enumerate(returned))


def _named(items: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in items:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from _named((f"{name}.{i}", item) for i, item in enumerate(value))
        elif isinstance(value, Mapping):
            yield from _named((f"{name}.{key}", item) for key, item in value.items())


@contextlib.contextmanager
def _hooks(
    module: torch.nn.Module, where: CapturePoints, marked: dict[str, torch.Tensor]
) -> Iterator[None]:
    """Collects the head's input and every block's output while the module runs."""

    def block(_: Any, __: Any, output: Any) -> None:
        first = output if isinstance(output, torch.Tensor) else output[0]
        marked[f"{BLOCK}{sum(name.startswith(BLOCK) for name in marked)}"] = first

    def head(_: Any, args: Any) -> None:
        marked[FINAL] = args[0]

    def trunk(_: Any, __: Any, output: Any) -> None:
        first = output if isinstance(output, torch.Tensor) else output[0]
        marked.setdefault(FINAL, first)

    handles = []
    if where.head is not None:
        handles.append(module.get_submodule(where.head).register_forward_pre_hook(head))
    elif where.trunk is not None:
        handles.append(module.get_submodule(where.trunk).register_forward_hook(trunk))
    if where.blocks is not None:
        for child in module.get_submodule(where.blocks).children():
            handles.append(child.register_forward_hook(block))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def meta_copy(
    module: torch.nn.Module,
    dtypes: Mapping[str, torch.dtype],
    device: str | None = None,
) -> torch.nn.Module:
    """Copies a module without its weights' values, in the dtypes given by name.

    Storage is reserved and never touched, so it costs address space alone; a module
    with a parameter on the meta device is put there whole, unless `device` says where.
    What is not a parameter or a buffer is copied as it is.
    """
    if device is None and any(weight.is_meta for weight in module.parameters()):
        device = "meta"

    def hollow(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(
            tensor.detach(),
            dtype=dtypes.get(name, tensor.dtype),
            device=device or tensor.device,
        )

    memo: dict[int, Any] = {
        id(buffer): hollow(name, buffer) for name, buffer in module.named_buffers()
    }
    for name, weight in module.named_parameters():
        memo[id(weight)] = torch.nn.Parameter(
            hollow(name, weight), requires_grad=weight.requires_grad
        )
    return copy.deepcopy(module, memo)


def export(
    module: torch.nn.Module,
    inputs: Mapping[str, Any],
    where: CapturePoints,
    *,
    train: bool,
    dynamic: bool,
) -> Program:
    """Exports a module at the shapes of `inputs`, batch and length left free if asked.

    Raises:
        LoweringExportError: torch cannot make one graph of it, or cannot free of
            mutation the graph it makes, or the graph would freeze a random mask.
    """
    if train:
        _refuse_frozen_masks(module)
    module.train(train)
    wrapper = Capture(module, where)
    shapes = pytree.tree_map(_free, dict(inputs)) if dynamic else None
    try:
        with TRACING, warnings.catch_warnings(), _told():
            # Torch's own copy of a tree spec warns of torch's own deprecation.
            warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
            exported = torch.export.export(
                wrapper,
                (dict(inputs),),
                strict=False,
                dynamic_shapes=None if shapes is None else (shapes,),
            )
            if _mutates(exported):
                exported = exported.run_decompositions({})
    except _FAULTS as fault:
        raise LoweringExportError(_refusal(module, fault)) from fault
    program = program_from_export(
        exported,
        _output_names(exported),
        # The private list is the only place that holds the branches torch took.
        guards=tuple(exported._guards_code) if dynamic else (),  # pyright: ignore[reportPrivateUsage]
    )
    if program.reading:
        listed = "".join(f"\n  {s.target} in {s.origin}" for s in program.reading)
        raise LoweringExportError(
            f"{type(module).__name__} reads numbers out of tensors, which no compiled "
            f"graph can:{listed}\nKeep it in torch as a live teacher"
        )
    return renamed(program, aliases(module))


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Holds back what goes to stderr, and drops it if the export fails.

    Torch prints the whole graph then, which says nothing that the error does not.
    """
    with contextlib.redirect_stderr(io.StringIO()) as held:
        yield
    sys.stderr.write(held.getvalue())


def _refuse_frozen_masks(module: torch.nn.Module) -> None:
    """Refuses SpecAugment, whose masks numpy draws: a graph would hold one for good."""
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


def _free(tensor: torch.Tensor) -> dict[int, Any]:
    """Frees the batch and, of integer inputs, the length; images keep their size."""
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
            # Moves its running statistics, which its schema does not say.
            or (node.target == torch.ops.aten.batch_norm.default and node.args[5])
        )
        for graph in exported.graph_module.modules()
        if isinstance(graph, torch.fx.GraphModule)
        for node in graph.graph.nodes
    )


def _refusal(module: torch.nn.Module, fault: BaseException) -> str:
    """Says where in the module's own source the export stopped, and what to try."""
    frames = traceback.extract_tb(fault.__traceback__)
    own = [frame for frame in frames if "/torch/" not in frame.filename]
    last = own[-1] if own else frames[-1]
    short = "/".join(last.filename.rsplit("/", 2)[-2:])
    first_line = next(iter(str(fault).strip().splitlines()), type(fault).__name__)
    told = (
        f"torch.export cannot make one graph of {type(module).__name__}: it stops at "
        f"{short}:{last.lineno}, `{last.line}`: {first_line}"
    )
    if (
        "data-dependent" in str(fault).lower()
        or "DataDependent" in type(fault).__name__
    ):
        told += (
            "\nThat line branches on the values of a tensor, which no compiled graph "
            'can. Try a config without rope_type="dynamic"; for a mixture of experts '
            'config._experts_implementation = "grouped_mm" or "batched_mm"; for '
            "training, layerdrop 0; or keep the model in torch as a live teacher"
        )
    return told
