"""Torch's dotted names to nested variables and back; dew's input names to torch's."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dew.tree import flatten, unflatten
from dew.typing import Variables

PARAMS, BUFFERS = "params", "buffers"
_TORCH_NAMES = {
    "tokens": "input_ids",
    "mask": "attention_mask",
    "positions": "position_ids",
}


def untrained_names(module: torch.nn.Module) -> set[str]:
    """Names what torch would not train: buffers, and parameters that take no gradient.

    A module that trains nothing at all is one that somebody froze; its parameters count
    as parameters.
    """
    frozen = {n for n, weight in module.named_parameters() if not weight.requires_grad}
    if len(frozen) == sum(1 for _ in module.parameters()):
        frozen = set()
    return frozen | {name for name, _ in module.named_buffers()}


def recomputed_buffers(module: torch.nn.Module) -> set[str]:
    """Names the buffers that torch leaves out of the state dict."""
    saved = set(module.state_dict(keep_vars=True))
    return {name for name, _ in module.named_buffers() if name not in saved}


def nest_weights(leaves: Mapping[str, Any], buffers: Iterable[str]) -> dict[str, Any]:
    """Nests weights at the dots of their names; `buffers` get their own collection."""
    apart = set(buffers)
    return unflatten(
        {
            (BUFFERS if name in apart else PARAMS, *name.split(".")): leaf
            for name, leaf in leaves.items()
        }
    )


def flat_weights(variables: Variables) -> dict[str, Any]:
    """Joins nested variables back to torch's names; other collections are left out."""
    kept = {c: variables[c] for c in (PARAMS, BUFFERS) if c in variables}
    return {".".join(path[1:]): leaf for path, leaf in flatten(kept).items()}


def module_inputs(module: torch.nn.Module) -> tuple[str, ...]:
    """Returns the names of what the module's forward takes."""
    return tuple(inspect.signature(module.forward).parameters)


def torch_inputs(module: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the inputs under the names of the module's own forward.

    Raises:
        ValueError: the forward takes no such input; all of them are named.
    """
    parameters = module_inputs(module)
    named, unknown = {}, []
    for name, value in inputs.items():
        if value is None:
            continue
        target = name if name in parameters else _TORCH_NAMES.get(name, name)
        if target in parameters:
            named[target] = value
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} takes no input {', '.join(sorted(unknown))}; its "
            f"forward takes {', '.join(parameters)}"
        )
    return {name: named[name] for name in parameters if name in named}


def aliases(module: torch.nn.Module) -> dict[str, str]:
    """Maps each name a weight goes by to the first: tied weights are one leaf."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names
