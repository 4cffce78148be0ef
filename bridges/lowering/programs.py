"""The exported programs of one module: made on demand and cached."""

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import torch
from jaxtyping import PyTree
from torch.utils import _pytree as pytree

from dew.bridges.lowering.errors import LoweringExportError
from dew.bridges.lowering.graph import Program
from dew.bridges.lowering.guards import holds
from dew.bridges.lowering.torch_export import CapturePoints, export, meta_copy


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """One program of a module, and how it was exported.

    `is_dynamic` is true where batch and length are free as far as the module allows;
    `refusal` is torch's reason where free lengths were requested and impossible.
    """

    program: Program
    train: bool
    is_dynamic: bool
    export_seconds: float
    refusal: str | None = None

    @property
    def num_ops(self) -> int:
        """The number of instructions in the whole graph."""
        return len(self.program.instructions)


@dataclass(kw_only=True, eq=False)
class Programs:
    """Every lowering of one module, looked up by mode, dtypes and input shapes.

    `meta` is the module without its weights' values, `points` where trunk and blocks
    are captured, and `lowerings` all that were exported so far, in order. With
    `dynamic` batch and length are left free where the module allows.
    """

    meta: torch.nn.Module
    points: CapturePoints
    dynamic: bool
    lowerings: list[Lowering] = field(default_factory=list)
    _by_key: dict[Hashable, list[Lowering]] = field(default_factory=dict)
    _device: str | None = None

    def find(
        self,
        dtypes: Mapping[str, torch.dtype],
        inputs: Mapping[str, PyTree],
        *,
        train: bool,
    ) -> Lowering:
        """Returns a lowering that is valid for these inputs, exported if need be.

        `inputs` go by the module's own names, as trees of arrays or of their shapes and
        dtypes. `dtypes` are those of weights that differ from the module's own.

        Raises:
            LoweringExportError: torch cannot export the module.
        """
        leaves, structure = pytree.tree_flatten(dict(inputs))
        kinds = tuple(_kind(leaf) for leaf in leaves)
        # Shapes are not part of the key: a graph with free lengths serves many, and its
        # guards decide. Kinds are, as boolean and integer masks trace differently.
        key = (train, tuple(sorted(dtypes.items(), key=str)), str(structure), kinds)
        shapes = {
            name: pytree.tree_map(_shape, value) for name, value in inputs.items()
        }
        for lowering in self._by_key.get(key, ()):
            if holds(lowering.program, shapes):
                return lowering
        lowering = self._make(dtypes, inputs, shapes, train=train)
        if any(tensor.is_meta for tensor in lowering.program.constants.values()):
            # The meta device loses the numbers that a forward pass writes into its
            # graph, and a module that does so once does so in every mode.
            self._device = "cpu"
            lowering = self._make(dtypes, inputs, shapes, train=train)
        self._by_key.setdefault(key, []).append(lowering)
        self.lowerings.append(lowering)
        return lowering

    def _make(
        self,
        dtypes: Mapping[str, torch.dtype],
        inputs: Mapping[str, PyTree],
        shapes: Mapping[str, PyTree],
        *,
        train: bool,
    ) -> Lowering:
        # A copy for each export: hooks, training mode and dtypes are set on it.
        module = meta_copy(self.meta, dtypes, self._device)
        examples = example_tensors(module, inputs)
        started, refusal = time.perf_counter(), None
        # Torch specialises a length of 1, as it decides what broadcasts.
        if self.dynamic and all(
            min(tensor.shape, default=2) > 1 for tensor in pytree.tree_leaves(examples)
        ):
            try:
                program = export(
                    module, examples, self.points, train=train, dynamic=True
                )
            except LoweringExportError as fault:
                refusal = str(fault)
            else:
                # Torch may have specialised a length to the example's, or guard on one
                # in a way that even the example breaks.
                if holds(program, shapes):
                    return _timed_lowering(
                        program, started, train=train, is_dynamic=True
                    )
                refusal = "the graph with free lengths does not hold at these"
        program = export(module, examples, self.points, train=train, dynamic=False)
        return _timed_lowering(
            program, started, train=train, is_dynamic=False, refusal=refusal
        )


def _timed_lowering(
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
    module: torch.nn.Module, inputs: Mapping[str, PyTree]
) -> dict[str, PyTree]:
    """Returns zeros of the inputs' shapes, in the dtypes that the module expects.

    Integers are int64, torch's default, and so is an attention mask of booleans, which
    some modules subtract from 1. Floats get the dtype of the module's weights, and all
    are on the device of the first weight.
    """
    weights = [w for w in module.parameters() if w.is_floating_point()]
    dtypes = {
        "float": weights[0].dtype if weights else torch.float32,
        "bool": torch.bool,
        "int": torch.int64,
    }
    device = weights[0].device if weights else torch.device("cpu")

    def zeros(name: str, leaf: Any) -> torch.Tensor:
        kind = _kind(leaf)
        kind = "int" if kind == "bool" and name.endswith("attention_mask") else kind
        return torch.zeros(_shape(leaf), dtype=dtypes[kind], device=device)

    return {
        name: pytree.tree_map(lambda leaf, name=name: zeros(name, leaf), value)
        for name, value in inputs.items()
    }
