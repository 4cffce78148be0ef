"""Transfer of weights between a live torch module and variables, in memory."""

import numpy as np
import torch

from dew.bridges.dlpack import to_jax, to_torch
from dew.bridges.names import (
    aliases,
    flat_weights,
    nest_weights,
    recomputed_buffers,
    untrained_names,
)
from dew.typing import Variables


def variables_of(module: torch.nn.Module, *, copy: bool = True) -> Variables:
    """Returns a module's state dict as variables: `params/…` and `buffers/…`.

    Tied weights are one leaf, under the first of their names. Without `copy` the arrays
    share the module's memory, by the rules of `dew.bridges.dlpack`.

    >>> variables = variables_of(torch.nn.Linear(2, 3))
    >>> sorted(variables["params"]), variables["params"]["weight"].shape
    (['bias', 'weight'], (3, 2))
    """
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    recomputed = recomputed_buffers(module)
    names = [n for n in dict.fromkeys(aliases(module).values()) if n not in recomputed]
    leaves = to_jax({name: tensors[name] for name in names}, copy=copy)
    return nest_weights(leaves, untrained_names(module))


def state_dict_of(
    variables: Variables, *, copy: bool = False
) -> dict[str, torch.Tensor]:
    """Returns variables under torch's names, in shared memory unless `copy`.

    >>> module = torch.nn.Linear(2, 3)
    >>> state = state_dict_of(variables_of(module))
    >>> torch.equal(state["weight"], module.weight)
    True
    """
    return to_torch(flat_weights(variables), copy=copy)


def fill_module(module: torch.nn.Module, variables: Variables) -> None:
    """Copies variables into the weights of a live module, tied ones once.

    The module keeps its own dtypes and devices; buffers that torch recomputes are left
    unchanged.

    >>> source, target = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    >>> fill_module(target, variables_of(source))
    >>> torch.equal(target.bias, source.bias)
    True

    Raises:
        ValueError: names or shapes differ; the message lists all of them, and nothing
            is copied.
    """
    weights = flat_weights(variables)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    recomputed = recomputed_buffers(module)
    expected = {n for n in aliases(module).values() if n not in recomputed}
    faults = [f"missing: {name}" for name in sorted(expected - set(weights))]
    faults += [f"unexpected: {name}" for name in sorted(set(weights) - expected)]
    faults += [
        f"{name} is {list(np.shape(weights[name]))}, the module's is "
        f"{list(tensors[name].shape)}"
        for name in sorted(expected & set(weights))
        if np.shape(weights[name]) != tuple(tensors[name].shape)
    ]
    if faults:
        raise ValueError(
            f"the variables do not fit {type(module).__name__}: {'; '.join(faults)}"
        )
    with torch.no_grad():
        for name, tensor in state_dict_of(variables).items():
            tensors[name].copy_(tensor)
