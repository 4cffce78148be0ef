"""The check that every lowering must pass: torch's outputs on the same inputs."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import PyTree
from torch.utils import _pytree as pytree

from dew.bridges.lowering.errors import LoweringParityError
from dew.bridges.lowering.model import Lowered
from dew.bridges.lowering.programs import example_tensors
from dew.bridges.lowering.torch_export import Capture, CapturePoints

EXACT = 1e-4
"""Largest difference allowed in float32, in standard deviations of torch's output; over
the zoo it stays below 4e-6."""

ROUNDED = 5e-2
"""Root mean square allowed for half-width floats, whose own rounding against float32 is
0.5e-2 to 2e-2, with some single differences many times that."""


def torch_outputs(
    module: torch.nn.Module, inputs: Mapping[str, PyTree], points: CapturePoints
) -> dict[str, torch.Tensor]:
    """Runs the module in torch on arrays by its own names; returns its tensors by name.

    The captured trunk and blocks are among them, under `FINAL` and `BLOCK`.
    """
    empty = example_tensors(module, inputs)
    tensors = pytree.tree_map(
        lambda like, array: torch.from_numpy(np.array(array)).to(like),
        empty,
        dict(inputs),
    )
    return Capture(module, points)(tensors)


def check_parity(lowered: Lowered, module: torch.nn.Module) -> float:
    """Returns the largest difference from torch, in standard deviations of an output.

    Raises:
        LoweringParityError: an output differs by more than rounding explains.
    """
    points = lowered.programs.points
    with torch.no_grad():
        expected = torch_outputs(module, lowered.example, points)
    outputs = lowered.outputs(lowered.variables, lowered.example)
    worst, faults = 0.0, []
    for name, array in outputs.items():
        want = expected[name].double().numpy()
        got = np.asarray(jnp.asarray(array, jnp.float32)).astype(np.float64)
        finite = np.isfinite(want)
        # One number alone, such as a loss, is measured by its own size.
        spread = float(np.std(want) if want.size > 1 else np.max(np.abs(want)))
        gaps = np.abs(got - want)[finite] / max(spread, 1e-6)
        is_half = expected[name].dtype in (torch.bfloat16, torch.float16)
        gap = float(np.sqrt(np.mean(gaps**2)) if is_half else np.max(gaps, initial=0))
        allowed = ROUNDED if is_half else EXACT
        # Written so that a NaN fails.
        if not gap <= allowed or not np.array_equal(finite, np.isfinite(got)):
            faults.append(f"{name} differs by {gap:.2e}, {allowed:.0e} is allowed")
        worst = max(worst, gap)
    if faults:
        raise LoweringParityError(
            f"lowered {type(module).__name__} disagrees with torch, in standard "
            f"deviations of torch's output: {'; '.join(faults)}. If you registered an "
            "op, check it; else report this and keep the model in torch"
        )
    return worst
