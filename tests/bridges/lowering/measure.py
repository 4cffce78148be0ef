"""How close a lowered model of the zoo is to torch: outputs, gradients, the split."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from dew.bridges import Lowered, LoweringError, lower
from dew.bridges.lowering.parity import check_parity, torch_outputs
from dew.bridges.names import flat_weights
from tests.bridges.lowering import zoo
from tests.support.tolerances import ZOO_OUTPUT


@dataclass(frozen=True, kw_only=True)
class Row:
    """The differences of one model from torch, and the size of its graph.

    `output` is in standard deviations of the output, `gradient` a part of the largest
    gradient; `split` is true if trunk and output embedding can run apart.
    """

    output: float
    gradient: float
    num_ops: int
    num_blocks: int
    split: bool


def measure(entry: zoo.Entry) -> Row:
    """Lowers a model of the zoo and compares it with torch.

    Raises:
        AssertionError: gradients have other names than torch's, or trunk and output
            embedding apart differ from the whole.
        LoweringError: the model does not lower, or not to torch's outputs.
    """
    model = entry.build()
    lowered = lower(model, entry.inputs(), dynamic=False, check=False)
    return Row(
        output=check_parity(lowered, model),
        gradient=gradient_gap(lowered, model, entry),
        num_ops=lowered.programs.lowerings[0].num_ops,
        num_blocks=lowered.num_blocks,
        split=can_split(lowered, entry),
    )


def gradient_gap(lowered: Lowered, model: Any, entry: zoo.Entry) -> float:
    """The largest difference of a weight's gradient, as a part of the largest one."""
    inputs = entry.inputs()

    def loss(params: Any) -> jax.Array:
        variables = {**lowered.variables, "params": params}
        return jnp.mean(lowered.outputs(variables, inputs)[entry.loss_from] ** 2)

    ours = flat_weights({"params": jax.grad(loss)(lowered.variables["params"])})
    points = lowered.programs.points
    torch_outputs(model, lowered.example, points)[
        entry.loss_from
    ].square().mean().backward()
    theirs = {
        name: torch.zeros_like(w).numpy() if w.grad is None else w.grad.numpy()
        for name, w in model.named_parameters()
        if w.requires_grad
    }
    assert set(ours) == set(theirs)
    largest = max(np.abs(gradient).max() for gradient in theirs.values())
    return max(np.abs(ours[n] - theirs[n]).max() for n in theirs) / largest


def can_split(lowered: Lowered, entry: zoo.Entry) -> bool:
    """Whether trunk and embedding run apart; then their logits must be the model's."""
    variables, inputs = lowered.variables, entry.inputs()
    try:
        final = lowered.apply(variables, inputs, method="hidden")
        logits = lowered.apply(variables, final, method="unembed")
    except LoweringError:
        return False
    whole = lowered.apply(variables, inputs).logits
    np.testing.assert_allclose(logits, whole, atol=ZOO_OUTPUT * float(jnp.std(whole)))
    return True
