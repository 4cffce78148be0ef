"""The programs of one module: made when asked for, kept, counted."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import torch
from torch.utils import _pytree as pytree

from dew.bridges.lowering.errors import LoweringExportError
from dew.bridges.lowering.graph import Program
from dew.bridges.lowering.guards import holds
from dew.bridges.lowering.torch_export import CapturePoints, export, meta_copy


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """One program of a module, with how it came about.

    `is_dynamic` says that batch and length were left free where the module allows;
    `refusal` is torch's reason where they were asked for and could not be.
    """

    program: Program
    train: bool
    is_dynamic: bool
    export_seconds: float
    refusal: str | None = None

    @property
    def num_ops(self) -> int:
        """Counts the instructions of the whole graph."""
        return len(self.program.instructions)


@dataclass(kw_only=True, eq=False)
class Programs:
    """Every lowering of one module, found by mode, dtypes and input shapes.

    `hollow` is the module without its weights' values.
    """

    hollow: torch.nn.Module
    where: CapturePoints
    dynamic: bool
    made: list[Lowering] = field(default_factory=list)
    _found: dict[Any, list[Lowering]] = field(default_factory=dict)
    _device: str | None = None

    def find(
        self,
        dtypes: Mapping[str, torch.dtype],
        inputs: Mapping[str, Any],
        *,
        train: bool,
    ) -> Lowering:
        """Returns a program that holds for these inputs, making it if there is none.

        `inputs` go by the module's own names, as trees of arrays or their shapes.
        `dtypes` name the weights that are not in the dtype the module has them in.
        """
        leaves, structure = pytree.tree_flatten(dict(inputs))
        kinds = tuple(_kind(leaf) for leaf in leaves)
        key = (train, tuple(sorted(dtypes.items(), key=str)), str(structure), kinds)
        shapes = {
            name: pytree.tree_map(_shape, value) for name, value in inputs.items()
        }
        for lowering in self._found.get(key, ()):
            if holds(lowering.program, shapes):
                return lowering
        lowering = self._make(dtypes, inputs, shapes, train=train)
        if any(tensor.is_meta for tensor in lowering.program.constants.values()):
            # The meta device loses the numbers that a forward writes into its graph.
            self._device = "cpu"
            lowering = self._make(dtypes, inputs, shapes, train=train)
        self._found.setdefault(key, []).append(lowering)
        self.made.append(lowering)
        return lowering

    def _make(
        self,
        dtypes: Mapping[str, torch.dtype],
        inputs: Mapping[str, Any],
        shapes: Mapping[str, Any],
        *,
        train: bool,
    ) -> Lowering:
        module = meta_copy(self.hollow, dtypes, self._device)
        examples = example_tensors(module, inputs)
        started, refusal = time.perf_counter(), None
        # Torch bakes a length of 1 in, as it decides what broadcasts.
        if self.dynamic and all(
            min(tensor.shape, default=2) > 1 for tensor in pytree.tree_leaves(examples)
        ):
            try:
                program = export(
                    module, examples, self.where, train=train, dynamic=True
                )
            except LoweringExportError as fault:
                refusal = str(fault)
            else:
                if holds(program, shapes):
                    return _timed(program, started, train=train, is_dynamic=True)
                refusal = "the graph with free lengths does not hold at these"
        program = export(module, examples, self.where, train=train, dynamic=False)
        return _timed(program, started, train=train, is_dynamic=False, refusal=refusal)


def _timed(
    program: Program,
    started: float,
    *,
    train: bool,
    is_dynamic: bool,
    refusal: str | None = None,
) -> Lowering:
    return Lowering(
        program=program,
        train=train,
        is_dynamic=is_dynamic,
        export_seconds=time.perf_counter() - started,
        refusal=refusal,
    )


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape)


def _kind(leaf: Any) -> str:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return "float"
    return "bool" if leaf.dtype == jnp.bool_ else "int"


def example_tensors(
    module: torch.nn.Module, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns zeros of the inputs' shapes, in the dtypes the module wants them in.

    Integers are int64, as torch has them, and so is an attention mask of booleans,
    which some modules subtract from 1. Floats get the dtype of the module's weights.
    """
    weights = [w for w in module.parameters() if w.is_floating_point()]
    dtypes = {
        "float": weights[0].dtype if weights else torch.float32,
        "bool": torch.bool,
        "int": torch.int64,
    }
    device = weights[0].device if weights else torch.device("cpu")

    def made(name: str, leaf: Any) -> torch.Tensor:
        kind = _kind(leaf)
        kind = "int" if kind == "bool" and name.endswith("attention_mask") else kind
        return torch.zeros(_shape(leaf), dtype=dtypes[kind], device=device)

    return {
        name: pytree.tree_map(lambda leaf, name=name: made(name, leaf), value)
        for name, value in inputs.items()
    }
