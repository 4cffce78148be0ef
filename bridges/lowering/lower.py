"""`lower`: a torch module as a JAX function of its variables, checked once."""

from collections.abc import Mapping

import jax
import numpy as np
import torch
from jax.typing import ArrayLike
from jaxtyping import PyTree

from dew.bridges.dlpack import to_jax
from dew.bridges.lowering.model import Lowered
from dew.bridges.lowering.parity import check_parity
from dew.bridges.lowering.programs import Programs
from dew.bridges.lowering.torch_export import capture_points, meta_copy
from dew.bridges.module_state import variables_of
from dew.bridges.names import named_inputs, recomputed_buffers, torch_inputs
from dew.typing import Variables


def lower(
    module: torch.nn.Module,
    example_inputs: Mapping[str, PyTree] | tuple[PyTree, ...] | ArrayLike,
    *,
    dynamic: bool = True,
    blocks: str | None = None,
    share: bool = False,
    check: bool = True,
) -> Lowered:
    """Lowers a torch module to a JAX model whose variables keep torch's names.

    Args:
        module: Any module; its training mode is restored.
        example_inputs: Arrays by name: `tokens`, `mask`, `positions`, or the names of
            the arguments of the module's own forward; a tuple of arrays, or one, is
            its first arguments. On them, and in evaluation mode, the lowered function
            is compared with torch unless `check` is False.
        dynamic: Leaves batch and length free where the module allows; otherwise each
            new shape is exported when it is first used.
        blocks: Name of the list of submodules that `layers` counts, by default the
            longest list of like submodules.
        share: Lets the variables alias the module's memory, which must then not be
            changed. By default they are copies, so the module may continue to train.
        check: Whether to compare with torch.

    Returns:
        The model, its weights in `.variables`. Its `apply` gives logits and hidden
        states, as objectives take them, and its `outputs` every tensor that the module
        returns, by torch's names: the keys of a dict, the fields of a record, the
        indices of a tuple. Buffers, and parameters that take no
        gradient (for example Whisper's positions), are in the collection `buffers`.

    Raises:
        LoweringExportError: torch cannot export it; with the line and what to try.
        MissingOpsError: it uses ops that have no JAX implementation; names all of them.
        LoweringParityError: torch and the lowered function disagree.

    Example:
        >>> import jax.numpy as jnp
        >>> import torch
        >>> import dew.bridges
        >>> module = torch.nn.Linear(3, 2)
        >>> lowered = dew.bridges.lower(module, {"input": jnp.ones((4, 3))})
        >>> sorted(lowered.variables["params"])
        ['bias', 'weight']
        >>> out = lowered.apply(lowered.variables, {"input": jnp.ones((5, 3))})
        >>> out.logits.shape
        (5, 2)
    """
    lowered = lowered_module(
        module,
        variables_of(module, copy=not share),
        torch_inputs(
            module, jax.tree.map(np.asarray, dict(named_inputs(module, example_inputs)))
        ),
        dynamic=dynamic,
        blocks=blocks,
    )
    if check:
        was_training = module.training
        check_parity(lowered, module.eval())
        module.train(was_training)
    return lowered


def lowered_module(
    module: torch.nn.Module,
    variables: Variables,
    example: Mapping[str, PyTree],
    *,
    dynamic: bool,
    blocks: str | None = None,
) -> Lowered:
    """Wraps a module whose weights are already in `variables`; nothing is checked.

    `example` has the names of the module's own forward.
    """
    buffers = dict(module.named_buffers())
    return Lowered(
        variables=variables,
        programs=Programs(
            meta=meta_copy(module, {}),
            points=capture_points(module, blocks),
            dynamic=dynamic,
        ),
        example=example,
        fixed={
            name: np.asarray(to_jax(buffers[name], copy=True))
            for name in recomputed_buffers(module)
        },
    )
