"""`lower`: any torch module as a JAX function of its variables, checked once."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from dew.bridges.dlpack import to_jax
from dew.bridges.lowering.model import Lowered
from dew.bridges.lowering.parity import check_parity
from dew.bridges.lowering.programs import Programs
from dew.bridges.lowering.torch_export import marks, meta_copy
from dew.bridges.module_state import variables_of
from dew.bridges.names import recomputed, torch_inputs
from dew.typing import Variables


def lower(
    module: torch.nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    dynamic: bool = True,
    blocks: str | None = None,
    share: bool = False,
    check: bool = True,
) -> Lowered:
    """Turns a torch module into a model of ours, its variables named as torch's.

    `example_inputs` are arrays by name (`tokens`, `mask`, `positions`, or the names of
    the module's own forward). The module must agree with torch on them, in evaluation
    mode, unless `check` is False. `dynamic` leaves batch and length free where the
    module allows; otherwise each new shape is exported when it comes. `blocks` names
    the list of submodules that `layers` counts, where the longest one is not it.

    Buffers, and parameters that take no gradient (Whisper's positions, say), are in
    the collection `buffers`. The variables are copies, so the module may go on
    training; `share` lets them alias its memory, and then it must not be changed.

    Raises:
        LoweringExportError: torch cannot export it; says where and what to try.
        MissingOpsError: it uses ops that are in no table; names all of them.
        LoweringParityError: torch and the lowered function disagree.
    """
    lowered = lowered_module(
        module,
        variables_of(module, copy=not share),
        torch_inputs(module, jax.tree.map(np.asarray, dict(example_inputs))),
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
    example: Mapping[str, Any],
    *,
    dynamic: bool,
    blocks: str | None = None,
) -> Lowered:
    """Wraps a module whose weights are elsewhere already; nothing is checked."""
    buffers = dict(module.named_buffers())
    return Lowered(
        variables=variables,
        programs=Programs(
            hollow=meta_copy(module, {}), where=marks(module, blocks), dynamic=dynamic
        ),
        example=example,
        fixed={
            name: np.asarray(to_jax(buffers[name], copy=True))
            for name in recomputed(module)
        },
    )
