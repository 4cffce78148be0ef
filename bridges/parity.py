"""The one check a lowering must pass: torch's own answer on the same inputs."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from dew.bridges.errors import LoweringParityError
from dew.bridges.export import Marked
from dew.bridges.lowered import Lowered
from dew.bridges.programs import example_tensors

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference allowed, in standard deviations of torch's output.

Over the zoo float32 stays below 4e-6. Torch's own bfloat16 differs from its float32 by
about 8e-3 (root mean square), and the largest of many differences is some times that.
"""


def torch_outputs(
    module: torch.nn.Module, inputs: Mapping[str, Any], where: Any
) -> dict[str, torch.Tensor]:
    """Runs the module in torch on arrays given by its own names, blocks included."""
    empty = example_tensors(module, inputs)
    tensors = pytree.tree_map(
        lambda like, array: torch.from_numpy(np.array(array)).to(like),
        empty,
        dict(inputs),
    )
    return Marked(module, where)(tensors)


def check_parity(lowered: Lowered, module: torch.nn.Module) -> float:
    """Returns the largest difference from torch, in standard deviations.

    Raises:
        LoweringParityError: some output differs by more than rounding explains.
    """
    where = lowered.programs.where
    with torch.no_grad():
        theirs = torch_outputs(module, lowered.example, where)
    ours = lowered.outputs(lowered.variables, lowered.example)
    worst, faults = 0.0, []
    for name, array in ours.items():
        want = theirs[name].double().numpy()
        got = np.asarray(jnp.asarray(array, jnp.float32)).astype(np.float64)
        spread = max(float(np.std(want)), 1e-6)
        finite = np.isfinite(want)
        gap = float(np.max(np.abs(got - want)[finite], initial=0)) / spread
        allowed = TOLERANCE.get(theirs[name].dtype, 0.0)
        if gap > allowed or not np.array_equal(finite, np.isfinite(got)):
            faults.append(f"{name} differs by {gap:.2e}, {allowed:.0e} is allowed")
        worst = max(worst, gap)
    if faults:
        raise LoweringParityError(
            f"lowered {type(module).__name__} disagrees with torch, in standard "
            f"deviations of torch's output: {'; '.join(faults)}. If you registered an "
            "op, check it; else report this and keep the model in torch"
        )
    return worst
