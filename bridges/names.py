"""Translation of torch's dotted names to nested variables, and of input names."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from dew.tree import flatten, unflatten
from dew.typing import Variables

PARAMS, BUFFERS = "params", "buffers"
V = TypeVar("V")
_TORCH_NAMES = {
    "tokens": "input_ids",
    "mask": "attention_mask",
    "positions": "position_ids",
}


def untrained_names(module: torch.nn.Module) -> set[str]:
    """Returns the names of buffers and of parameters that require no gradient.

    Where no parameter requires one, the module was frozen as a whole for inference,
    and its parameters count as trainable.
    """
    frozen = {n for n, weight in module.named_parameters() if not weight.requires_grad}
    if len(frozen) == sum(1 for _ in module.parameters()):
        frozen = set()
    return frozen | {name for name, _ in module.named_buffers()}


def recomputed_buffers(module: torch.nn.Module) -> set[str]:
    """Returns the names of buffers that the state dict leaves out."""
    saved = set(module.state_dict(keep_vars=True))
    return {name for name, _ in module.named_buffers() if name not in saved}


def nest_weights(leaves: Mapping[str, object], buffers: Iterable[str]) -> Variables:
    """Nests weights at the dots of their names; `buffers` get their own collection."""
    buffer_names = set(buffers)
    return unflatten(
        {
            (BUFFERS if name in buffer_names else PARAMS, *name.split(".")): leaf
            for name, leaf in leaves.items()
        }
    )


def flat_weights(variables: Variables) -> dict[str, Any]:
    """Returns parameters and buffers under torch's names; other collections not."""
    weights = {c: variables[c] for c in (PARAMS, BUFFERS) if c in variables}
    return {".".join(path[1:]): leaf for path, leaf in flatten(weights).items()}


def module_inputs(module: torch.nn.Module) -> tuple[str, ...]:
    """Returns the parameter names of the module's forward."""
    return tuple(inspect.signature(module.forward).parameters)


def takes_input(module: torch.nn.Module, name: str) -> bool:
    """Whether the module's own forward has an input of this name, dew's or torch's."""
    return bool({name, _TORCH_NAMES.get(name, name)} & {*module_inputs(module)})


def named_inputs(module: torch.nn.Module, inputs: Any) -> Mapping[str, Any]:
    """Returns inputs by name: a tuple, or one array, is the forward's first parameters.

    Raises:
        ValueError: there are more inputs than parameters.
    """
    if isinstance(inputs, Mapping):
        return inputs
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    parameters = module_inputs(module)
    if len(values) > len(parameters):
        raise ValueError(
            f"{type(module).__name__} takes {len(parameters)} inputs, "
            f"{', '.join(parameters)}, got {len(values)}"
        )
    return dict(zip(parameters, values, strict=False))


def torch_inputs(module: torch.nn.Module, inputs: Mapping[str, V]) -> dict[str, V]:
    """Returns the inputs under the names of the module's own forward.

    Raises:
        ValueError: the forward has no such parameter; the message lists all of them.
    """
    parameters = module_inputs(module)
    arguments: dict[str, V] = {}
    unknown = []
    for name, value in inputs.items():
        if value is None:
            continue
        target = name if name in parameters else _TORCH_NAMES.get(name, name)
        if target in parameters:
            arguments[target] = value
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} takes no input {', '.join(sorted(unknown))}; its "
            f"forward takes {', '.join(parameters)}"
        )
    return {name: arguments[name] for name in parameters if name in arguments}


def aliases(module: torch.nn.Module) -> dict[str, str]:
    """Maps every name of a weight to its first one: tied weights are one leaf."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for listing in (module.named_parameters, module.named_buffers):
        for name, tensor in listing(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names
