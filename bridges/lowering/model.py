"""A lowered module as a model: one `apply` over all programs exported for it."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree
from torch.utils import _pytree as pytree

from dew.bridges.dtypes import jax_dtype, torch_dtype
from dew.bridges.lowering.errors import LoweringError
from dew.bridges.lowering.graph import Expected, Instruction, Program, Ref
from dew.bridges.lowering.programs import Programs
from dew.bridges.lowering.segments import (
    SEGMENTS,
    check_isolation,
    segments_as_positions,
)
from dew.bridges.lowering.torch_export import BLOCK, FINAL
from dew.bridges.names import (
    BUFFERS,
    flat_weights,
    module_inputs,
    named_inputs,
    nest_weights,
    takes_input,
    torch_inputs,
    untrained_names,
)
from dew.typing import Outputs, Variables

_LAST_AXIS = frozenset(
    f"aten.{name}"
    for name in (
        "linear.default matmul.default mul.Tensor mul.Scalar div.Tensor div.Scalar "
        "add.Tensor sub.Tensor tanh.default to.dtype to.device to.dtype_layout "
        "_to_copy.default t.default clamp.default type_as.default contiguous.default"
    ).split()
)
"""Ops allowed in an output embedding: each acts on every position alone, at any
length."""


@dataclass(kw_only=True, eq=False, repr=False)
class Lowered:
    """A torch module as a JAX model: pure `apply`, variables under torch's names.

    `variables` are copies of the module's weights when it was lowered: `params/…` and
    `buffers/…`, nested at the dots of the torch names. `programs.lowerings` lists the
    exported graphs: one for each mode, set of dtypes and, where lengths are not free,
    shape the model was applied at. `example` holds valid inputs under the names of the
    module's own forward. `fixed` are the buffers that torch recomputes and does not
    save, such as rotary embedding frequencies; they are not part of `variables`.
    """

    variables: Variables
    programs: Programs
    example: Mapping[str, PyTree]
    fixed: Mapping[str, np.ndarray]
    _compiled: dict[Hashable, Callable[..., list[Array]]] = field(default_factory=dict)
    _is_isolating: bool = False

    def apply(
        self,
        variables: Variables,
        inputs: Any,
        *,
        train: bool = False,
        layers: Sequence[int] = (),
        rngs: Mapping[str, Array] | None = None,
        mutable: Any = False,
        method: str | None = None,
    ) -> Any:
        """Evaluates the module, or its trunk or output embedding alone.

        The signature is that of `dew.typing.Model`. With `train` the module's own
        dropout draws from `rngs["dropout"]`. With `mutable` naming `buffers` the result
        is a pair: outputs, and the buffers that the forward pass updated.

        Raises:
            LoweringError: the module cannot be split as `method` requires, or mixes
                the documents of packed rows.
            ValueError: `variables` lack weights, `layers` names a block that does not
                exist, dropout is active without a key, running statistics would be
                lost as `mutable` does not name them, or the module returns neither
                logits nor hidden states: `outputs` has what it returns.
        """
        weights = flat_weights(variables)
        if method == "unembed":
            return self._unembed(weights, inputs)
        if method not in (None, "hidden"):
            raise ValueError(f"method must be None, hidden or unembed, got {method!r}")
        inputs = named_inputs(self.programs.meta, inputs)
        program, leaves = self._bind(weights, inputs, train=train)
        moving = [name for name in program.updates if name not in self.fixed]
        if train and moving and not _names_buffers(mutable):
            raise ValueError(
                f"{type(self.programs.meta).__name__} updates {', '.join(moving)} in "
                f"training, which would be lost: apply it with mutable=[{BUFFERS!r}]"
            )
        refs = self._requested_values(program, layers, hidden_alone=method == "hidden")
        # Buffer updates are computed in the same pass as the outputs: a second one
        # would draw other dropout masks.
        updates = program.updates if _names_buffers(mutable) else {}
        results = self._run(program, leaves, [*refs.values(), *updates.values()], rngs)
        values = dict(zip(refs, results, strict=False))
        outputs = values[FINAL] if method == "hidden" else _outputs(values, len(layers))
        if not mutable:
            return outputs
        moved = dict(zip(updates, results[len(refs) :], strict=True))
        # Fixed buffers are recomputed by torch, so they have no variable to update.
        moved = {name: new for name, new in moved.items() if name not in self.fixed}
        state = nest_weights(weights | moved, untrained_names(self.programs.meta))
        return outputs, {BUFFERS: state[BUFFERS]} if moved else {}

    def outputs(
        self,
        variables: Variables,
        inputs: Any,
        *,
        train: bool = False,
        rngs: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Returns every tensor that the torch module returns, under torch's names.

        Parts of a tuple, list, dict or dataclass have their index or key, joined by
        dots; a bare tensor is `output`. `inputs` are those of `apply`: arrays by name,
        a tuple of the first ones, or one array.
        """
        inputs = named_inputs(self.programs.meta, inputs)
        program, leaves = self._bind(flat_weights(variables), inputs, train=train)
        refs = {
            name: value
            for name, value in program.outputs.items()
            if name != FINAL and not name.startswith(BLOCK)
        }
        results = self._run(program, leaves, list(refs.values()), rngs)
        return dict(zip(refs, results, strict=True))

    def __repr__(self) -> str:
        count = len(self.programs.lowerings)
        return f"Lowered({type(self.programs.meta).__name__}, {count} lowerings)"

    def takes(self, name: str) -> bool:
        """Whether the module's forward has an input of this name, dew's or torch's."""
        return takes_input(self.programs.meta, name)

    @property
    def num_blocks(self) -> int:
        """The number of blocks that `layers` may name."""
        weights = flat_weights(self.variables)
        return _num_blocks(self._find_program(weights, self.example, train=False))

    def layer(self, name: str) -> int:
        """Returns the number that a torch submodule has in `layers`.

        Raises:
            ValueError: the submodule is not one of the blocks.
        """
        blocks = self.programs.points.blocks
        inside = self.programs.meta.get_submodule(blocks).children() if blocks else ()
        numbers = {f"{blocks}.{number}": number for number, _ in enumerate(inside)}
        if name not in numbers:
            raise ValueError(
                f"{name!r} is not a block of this model; its blocks are "
                f"{', '.join(numbers) or 'none'}"
            )
        return numbers[name]

    def _bind(
        self, weights: Mapping[str, Any], inputs: Mapping[str, PyTree], *, train: bool
    ) -> tuple[Program, dict[str, Array]]:
        """Returns the program for these inputs, and the values of its free names."""
        if SEGMENTS in inputs:
            self._check_isolation(inputs)
            inputs = segments_as_positions(inputs)
        arrays = pytree.tree_map(jnp.asarray, torch_inputs(self.programs.meta, inputs))
        program = self._find_program(weights, arrays, train=train)
        leaves = self._leaves(program, weights)
        # Torch's pytree flattened the inputs at export; the same flattening here
        # yields the same order.
        flat = pytree.tree_leaves(arrays)
        for (name, expected), array in zip(program.inputs.items(), flat, strict=True):
            leaves[name] = jnp.asarray(array, jax_dtype(expected.dtype))
        return program, leaves

    def _check_isolation(self, inputs: Mapping[str, PyTree]) -> None:
        """Checks, once, that this module keeps packed documents apart."""
        owner = type(self.programs.meta).__name__
        if "position_ids" not in module_inputs(self.programs.meta):
            raise LoweringError(
                f"{owner} takes no position_ids, so it cannot tell the documents of a "
                "packed row apart; train it on rows of one document each, with a mask "
                "in place of segment_ids, which is packing='apart'"
            )
        if self._is_isolating:
            return

        def run(packed: dict[str, PyTree]) -> Array:
            outputs = self.apply(self.variables, packed)
            return outputs.final if outputs.logits is None else outputs.logits

        # Small ids are in every vocabulary.
        check_isolation(run, 16, owner)
        self._is_isolating = True

    def _find_program(
        self, weights: Mapping[str, Any], inputs: Mapping[str, PyTree], *, train: bool
    ) -> Program:
        """Finds the program whose weights have the dtypes that the variables have."""
        meta, dtypes = self.programs.meta, {}
        for name, weight in (*meta.named_parameters(), *meta.named_buffers()):
            if name in weights and weight.is_floating_point():
                dtype = torch_dtype(weights[name].dtype)
                if dtype != weight.dtype:
                    dtypes[name] = dtype
        return self.programs.find(dtypes, inputs, train=train).program

    def _leaves(self, program: Program, weights: Mapping[str, Any]) -> dict[str, Array]:
        """Returns the program's weights and constants as arrays, by its own names."""
        arrays = {**self.fixed, **weights}
        lacking = sorted(set(program.weights.values()) - set(arrays))
        if lacking:
            raise ValueError(
                f"the variables lack {', '.join(lacking[:8])} "
                f"({len(lacking)} of {len(program.weights)} weights); pass all of "
                "params and buffers, as in `lowered.variables`"
            )
        leaves = {value: arrays[name] for value, name in program.weights.items()}
        constants = {
            name: jnp.asarray(tensor.detach().cpu().numpy())
            for name, tensor in program.constants.items()
        }
        return leaves | constants

    def _requested_values(
        self, program: Program, layers: Sequence[int], *, hidden_alone: bool
    ) -> dict[str, Any]:
        """Returns the values to compute, by name, blocks in the order of `layers`."""
        outputs = dict(program.outputs)
        if FINAL not in outputs and "last_hidden_state" in outputs:
            outputs[FINAL] = outputs["last_hidden_state"]
        if hidden_alone and FINAL not in outputs:
            raise LoweringError(
                f"{type(self.programs.meta).__name__} has no trunk to take hidden "
                "states from: it has neither an output embedding nor a base model"
            )
        count = _num_blocks(program)
        refs: dict[str, Any] = {}
        for order, layer in enumerate(layers):
            number = layer + count if layer < 0 else layer
            source = FINAL if number == count else f"{BLOCK}{number}"
            if source not in outputs:
                raise ValueError(
                    f"layers names {layer}; this model has {count} blocks, so it must "
                    f"be from {-count} to {count}"
                )
            refs[f"{BLOCK}{order}"] = outputs[source]
        if hidden_alone:
            return {FINAL: outputs[FINAL]}
        # A module that returns one bare tensor is a classifier or a layer: its tensor
        # takes the place of logits.
        outputs.setdefault("logits", outputs.get("output"))
        refs |= {
            name: outputs[name]
            for name in ("logits", FINAL)
            if outputs.get(name) is not None
        }
        if not refs:
            names = ", ".join(name for name, ref in outputs.items() if ref is not None)
            raise ValueError(
                f"{type(self.programs.meta).__name__} returns {names or 'nothing'}, "
                "none of them logits or hidden states; read all of them by "
                "lowered.outputs(variables, inputs)"
            )
        return refs

    def _unembed(self, weights: Mapping[str, Any], final: Array) -> Array:
        """Returns the logits of final hidden states of any leading shape."""
        program = self._find_program(weights, self.example, train=False)
        trunk_end, steps = _head_steps(program, type(self.programs.meta).__name__)
        names = {name for step in steps for name in step.refs()}
        arrays = self._leaves(program, weights) | {trunk_end.name: final}
        leaves = {name: arrays[name] for name in sorted(names & set(arrays))}
        refs = (program.outputs["logits"],)
        return self._evaluate(program, tuple(steps), refs, leaves, None)[0]

    def _run(
        self,
        program: Program,
        leaves: Mapping[str, Array],
        refs: Sequence[Any],
        rngs: Mapping[str, Array] | None,
    ) -> list[Array]:
        """Computes the referenced values and nothing that they do not depend on."""
        steps = program.dependencies(refs)
        rng = (rngs or {}).get("dropout")
        if rng is None and _import_interpreter().needs_key(steps):
            raise ValueError(
                f"{type(self.programs.meta).__name__} draws random numbers here, for "
                "dropout most likely; pass rngs={'dropout': jax.random.key(…)}, or "
                "train=False"
            )
        return self._evaluate(program, steps, tuple(refs), leaves, rng)

    def _evaluate(
        self,
        program: Program,
        steps: tuple[Instruction, ...],
        refs: tuple[Any, ...],
        leaves: Mapping[str, Array],
        rng: Array | None,
    ) -> list[Array]:
        """Runs under a jit of its own: one trace a shape, in and out of other jits."""
        # Programs are kept for the life of the model, so their ids are never reused.
        # The count of steps separates the output embedding alone from the whole.
        key = (id(program), refs, len(steps))
        if key not in self._compiled:
            interpreter = _import_interpreter()
            interpreter.register(steps)

            def run(leaves: Mapping[str, Array], rng: Array | None) -> list[Array]:
                return interpreter.evaluate(program, steps, refs, leaves, rng)

            self._compiled[key] = jax.jit(run)
        return self._compiled[key](dict(leaves), rng)


def _import_interpreter() -> ModuleType:
    """Imports the interpreter, the only part of the bridge that needs torch2jax."""
    try:
        from dew.bridges.lowering import interpreter
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"lowering a torch module needs {missing.name}: pip install "
            "'dew-bridge[torch]'. torch2jax is under GPLv3, or MIT for personal use, "
            "non-profits and companies of at most 25 people"
        ) from missing
    return interpreter


def _num_blocks(program: Program) -> int:
    return sum(name.startswith(BLOCK) for name in program.outputs)


def _names_buffers(mutable: Any) -> bool:
    if isinstance(mutable, bool | str):
        return mutable is True or mutable == BUFFERS
    return isinstance(mutable, Collection) and BUFFERS in mutable


def _outputs(values: Mapping[str, Array], num_layers: int) -> Outputs:
    """Collects the computed values into the outputs of a model."""
    return Outputs(
        logits=values.get("logits"),
        final=values.get(FINAL),
        hidden=tuple(values[f"{BLOCK}{order}"] for order in range(num_layers)),
    )


def _head_steps(program: Program, owner: str) -> tuple[Ref, list[Instruction]]:
    """Cuts the program at the trunk's end; the rest must hold at any length.

    Raises:
        LoweringError: there is no such cut, or what follows it mixes positions.
    """
    trunk_end, logits = program.outputs.get(FINAL), program.outputs.get("logits")
    if not isinstance(trunk_end, Ref) or logits is None:
        raise LoweringError(
            f"{owner} cannot be split into a trunk and an output embedding: it gives "
            "no logits from an embedding of its own; use the whole model"
        )
    steps = program.dependencies([logits], given=[trunk_end.name])
    inputs = set(program.inputs)
    # A step that reads the module's inputs, or an op that may mix positions, would make
    # the logits of a chunk differ from those of the whole sequence.
    faults = [
        f"{step.target} in {step.origin}"
        for step in steps
        if str(step.target) not in _LAST_AXIS or inputs & set(step.refs())
    ]
    if faults:
        raise LoweringError(
            f"{owner} cannot be split into a trunk and an output embedding: after its "
            f"trunk it still runs {', '.join(faults)}; use the whole model"
        )
    return trunk_end, [_open_shape(step) for step in steps]


def _open_shape(step: Instruction) -> Instruction:
    """Returns the instruction without the check of its result's shape."""
    match step.expected:
        case Expected() as one:
            return replace(step, expected=replace(one, shape=None))
        case _:
            return step
