"""A lowered module as a model: one `apply` over as many programs as it takes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from torch.utils import _pytree as pytree

from dew.bridges.dtypes import jax_dtype, torch_dtype
from dew.bridges.lowering.errors import LoweringError
from dew.bridges.lowering.graph import Expected, Instruction, Program, Ref
from dew.bridges.lowering.programs import Lowering, Programs
from dew.bridges.lowering.segments import SEGMENTS, check_isolation, unpacked
from dew.bridges.lowering.torch_export import BLOCK, FINAL
from dew.bridges.names import (
    BUFFERS,
    dotted,
    module_inputs,
    nested,
    torch_inputs,
    untrained,
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
"""What an output embedding may do: these act on each position alone, at any length."""


@dataclass(kw_only=True, eq=False, repr=False)
class Lowered:
    """A torch module as a model of ours: pure `apply`, variables under torch's names.

    `variables` are what the module held when it was lowered: `params/…` and
    `buffers/…`, nested at the dots of the torch names. `programs.made` lists the
    lowerings: one for each mode, set of dtypes and, where lengths are not free, shape
    the model was applied at. `example` holds inputs, by the module's own names, that it
    is known to run on. `fixed` are the buffers that torch recomputes and does not save,
    rope frequencies say: they are no variables.
    """

    variables: Variables
    programs: Programs
    example: Mapping[str, Any]
    fixed: Mapping[str, np.ndarray]
    _compiled: dict[Any, Callable[..., list[Array]]] = field(default_factory=dict)
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

        With `train` the module's own dropout draws from `rngs["dropout"]`. With
        `mutable` naming `buffers` the answer is a pair with the buffers it moved.
        """
        if method == "unembed":
            return self._unembed(variables, inputs)
        if method not in (None, "hidden"):
            raise ValueError(f"method must be None, hidden or unembed, got {method!r}")
        lowering, leaves = self._bound(variables, inputs, train=train)
        program = lowering.program
        named = self._wanted(program, layers, hidden_alone=method == "hidden")
        updates = program.updates if _names_buffers(mutable) else {}
        found = self._run(program, leaves, [*named.values(), *updates.values()], rngs)
        values = dict(zip(named, found, strict=False))
        answer = values[FINAL] if method == "hidden" else _outputs(values, len(layers))
        if not mutable:
            return answer
        moved = dict(zip(updates, found[len(named) :], strict=True))
        moved = {name: new for name, new in moved.items() if name not in self.fixed}
        state = nested(dotted(variables) | moved, untrained(self.programs.hollow))
        return answer, {BUFFERS: state[BUFFERS]} if moved else {}

    def outputs(
        self,
        variables: Variables,
        inputs: Mapping[str, Any],
        *,
        train: bool = False,
        rngs: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Returns every tensor that the torch module returns, under torch's names."""
        lowering, leaves = self._bound(variables, inputs, train=train)
        named = {
            name: value
            for name, value in lowering.program.outputs.items()
            if name != FINAL and not name.startswith(BLOCK)
        }
        found = self._run(lowering.program, leaves, list(named.values()), rngs)
        return dict(zip(named, found, strict=True))

    def __repr__(self) -> str:
        made = len(self.programs.made)
        return f"Lowered({type(self.programs.hollow).__name__}, {made} lowerings)"

    @property
    def num_blocks(self) -> int:
        """Counts the blocks that `layers` may name."""
        program = self._lowering(self.variables, self.example, train=False).program
        return _num_blocks(program)

    def layer(self, name: str) -> int:
        """Returns the number by which `layers` knows a torch submodule.

        Raises:
            ValueError: the submodule is none of the blocks.
        """
        blocks = self.programs.where.blocks
        inside = self.programs.hollow.get_submodule(blocks).children() if blocks else ()
        known = {f"{blocks}.{number}": number for number, _ in enumerate(inside)}
        if name not in known:
            raise ValueError(
                f"{name!r} is no block of this model; its blocks are "
                f"{', '.join(known) or 'none'}"
            )
        return known[name]

    def _bound(
        self, variables: Variables, inputs: Mapping[str, Any], *, train: bool
    ) -> tuple[Lowering, dict[str, Array]]:
        """Returns the program for these inputs, and the values it starts from."""
        if SEGMENTS in inputs:
            self._hold_apart(inputs)
            inputs = unpacked(inputs)
        named = pytree.tree_map(jnp.asarray, torch_inputs(self.programs.hollow, inputs))
        lowering = self._lowering(variables, named, train=train)
        slots, arrays = lowering.program.inputs, pytree.tree_leaves(named)
        leaves = self._weights(lowering.program, variables)
        for (name, expected), array in zip(slots.items(), arrays, strict=True):
            leaves[name] = jnp.asarray(array, jax_dtype(expected.dtype))
        return lowering, leaves

    def _hold_apart(self, inputs: Mapping[str, Any]) -> None:
        """Checks, once, that this module tells packed documents apart."""
        owner = type(self.programs.hollow).__name__
        if "position_ids" not in module_inputs(self.programs.hollow):
            raise LoweringError(
                f"{owner} takes no position_ids, so it cannot tell the documents of a "
                "packed row apart; train it on rows of one document each, with a mask "
                "in place of segment_ids, which is packing='apart'"
            )
        if self._is_isolating:
            return

        def run(packed: dict[str, Any]) -> Array:
            found = self.apply(self.variables, packed)
            return found.final if found.logits is None else found.logits

        # Small ids are in every vocabulary.
        check_isolation(run, 16, owner)
        self._is_isolating = True

    def _lowering(
        self, variables: Variables, named: Mapping[str, Any], *, train: bool
    ) -> Lowering:
        """Finds the program whose weights have the dtypes that the variables have."""
        hollow, given = self.programs.hollow, dotted(variables)
        dtypes = {}
        for name, weight in (*hollow.named_parameters(), *hollow.named_buffers()):
            if name in given and weight.is_floating_point():
                found = torch_dtype(given[name].dtype)
                if found != weight.dtype:
                    dtypes[name] = found
        return self.programs.find(dtypes, named, train=train)

    def _weights(self, program: Program, variables: Variables) -> dict[str, Array]:
        given = {**self.fixed, **dotted(variables)}
        lacking = sorted(set(program.weights.values()) - set(given))
        if lacking:
            raise ValueError(
                f"the variables lack {', '.join(lacking[:8])} "
                f"({len(lacking)} of {len(program.weights)} weights); pass all of "
                "params and buffers, as in `lowered.variables`"
            )
        leaves = {value: given[name] for value, name in program.weights.items()}
        constants = {
            name: jnp.asarray(tensor.detach().cpu().numpy())
            for name, tensor in program.constants.items()
        }
        return leaves | constants

    def _wanted(
        self, program: Program, layers: Sequence[int], *, hidden_alone: bool
    ) -> dict[str, Any]:
        """Returns the values to compute, by name, blocks in the order asked for."""
        outputs = dict(program.outputs)
        if FINAL not in outputs and "last_hidden_state" in outputs:
            outputs[FINAL] = outputs["last_hidden_state"]
        if hidden_alone and FINAL not in outputs:
            raise LoweringError(
                f"{type(self.programs.hollow).__name__} has no trunk to take hidden "
                "states from: it has neither an output embedding nor a base model"
            )
        count = _num_blocks(program)
        named: dict[str, Any] = {}
        for order, layer in enumerate(layers):
            number = layer + count if layer < 0 else layer
            source = FINAL if number == count else f"{BLOCK}{number}"
            if source not in outputs:
                raise ValueError(
                    f"layers names {layer}; this model has {count} blocks, so it must "
                    f"be from {-count} to {count}"
                )
            named[f"{BLOCK}{order}"] = outputs[source]
        if hidden_alone:
            return {FINAL: outputs[FINAL]}
        outputs.setdefault("logits", outputs.get("output"))
        return named | {
            name: outputs[name]
            for name in ("logits", FINAL)
            if outputs.get(name) is not None
        }

    def _unembed(self, variables: Variables, final: Array) -> Array:
        """Turns final hidden states of any leading shape into logits."""
        program = self._lowering(variables, self.example, train=False).program
        mark, steps = _head(program, type(self.programs.hollow).__name__)
        read = {name for step in steps for name in step.refs()}
        known = self._weights(program, variables) | {mark.name: final}
        leaves = {name: known[name] for name in sorted(read & set(known))}
        wanted = (program.outputs["logits"],)
        return self._evaluate(program, tuple(steps), wanted, leaves, None)[0]

    def _run(
        self,
        program: Program,
        leaves: Mapping[str, Array],
        wanted: Sequence[Any],
        rngs: Mapping[str, Array] | None,
    ) -> list[Array]:
        steps = program.needed(wanted)
        rng = (rngs or {}).get("dropout")
        if rng is None and _runtime().needs_key(steps):
            raise ValueError(
                f"{type(self.programs.hollow).__name__} draws random numbers here, for "
                "dropout most likely; pass rngs={'dropout': jax.random.key(…)}, or "
                "train=False"
            )
        return self._evaluate(program, steps, tuple(wanted), leaves, rng)

    def _evaluate(
        self,
        program: Program,
        steps: tuple[Instruction, ...],
        wanted: tuple[Any, ...],
        leaves: Mapping[str, Array],
        rng: Array | None,
    ) -> list[Array]:
        """Runs under a jit of its own: one trace a shape, in and out of other jits."""
        key = (id(program), wanted, len(steps))
        if key not in self._compiled:
            runtime = _runtime()
            runtime.register(steps)

            def run(leaves: Mapping[str, Array], rng: Array | None) -> list[Array]:
                return runtime.evaluate(program, steps, wanted, leaves, rng)

            self._compiled[key] = jax.jit(run)
        return self._compiled[key](dict(leaves), rng)


def _runtime() -> ModuleType:
    """Imports what needs torch2jax, which other parts of the bridge do without."""
    try:
        from dew.bridges.lowering import interpreter as lowering_runtime
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"lowering a torch module needs {missing.name}: pip install "
            "'dew-bridge[torch]'. torch2jax is under GPLv3, or MIT for personal use, "
            "non-profits and companies of at most 25 people"
        ) from missing
    return lowering_runtime


def _num_blocks(program: Program) -> int:
    return sum(name.startswith(BLOCK) for name in program.outputs)


def _names_buffers(mutable: Any) -> bool:
    if isinstance(mutable, bool | str):
        return mutable is True or mutable == BUFFERS
    return isinstance(mutable, Collection) and BUFFERS in mutable


def _outputs(values: Mapping[str, Array], num_layers: int) -> Outputs:
    return Outputs(
        logits=values.get("logits"),
        final=values.get(FINAL),
        hidden=tuple(values[f"{BLOCK}{order}"] for order in range(num_layers)),
    )


def _head(program: Program, owner: str) -> tuple[Ref, list[Instruction]]:
    """Cuts the program at the trunk's end; what follows must fit any length.

    Raises:
        LoweringError: there is no such cut, or what follows it mixes positions.
    """
    mark, logits = program.outputs.get(FINAL), program.outputs.get("logits")
    if not isinstance(mark, Ref) or logits is None:
        raise LoweringError(
            f"{owner} cannot be split into a trunk and an output embedding: it gives "
            "no logits from an embedding of its own; use the whole model"
        )
    steps = program.needed([logits], given=[mark.name])
    inputs = set(program.inputs)
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
    return mark, [_opened(step) for step in steps]


def _opened(step: Instruction) -> Instruction:
    """Returns the instruction with its result's shape left open."""
    match step.expected:
        case Expected() as one:
            return replace(step, expected=replace(one, shape=None))
        case _:
            return step
