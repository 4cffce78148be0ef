"""The largest difference between the outputs of torch and of dew for one model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from dew.bridges.certificate.inputs import Probe
from dew.bridges.lowering.model import Lowered
from dew.bridges.lowering.parity import torch_outputs
from dew.bridges.lowering.torch_export import CapturePoints
from dew.bridges.names import torch_inputs
from dew.converters.pretrained import Pretrained

ABSOLUTE = 1e-4
RELATIVE = 2e-5
OWN = 4.0
"""Logits may differ by ABSOLUTE, by RELATIVE of the largest, or by OWN times what two
ways of attention differ by in torch itself, whichever is most. A model that magnifies
rounding does so in every framework: after 16 steps of training, SmolLM2 in torch is
1.4e-3 from its float64 logits at one of 512 random tokens, and 1e-4 at most others.
"""


@dataclass(frozen=True, kw_only=True)
class Logits:
    """The differences of one output from torch, in float32, over all probes.

    `output` is its name in torch: logits, or for a model without a head its hidden
    states. `torch_own_difference` is the largest difference between torch's own `eager`
    and `sdpa` attention. `scale` is the largest value; `argmax_agreement` the share of
    positions with the same most likely token. `longest` is the length of the longest
    row in tokens.
    """

    output: str
    largest_difference: float
    torch_own_difference: float
    allowed: float
    scale: float
    argmax_agreement: float
    positions: int
    longest: int


@dataclass
class _OutputDifference:
    """Running differences of one output over the probes so far."""

    difference: float = 0.0
    own: float = 0.0
    scale: float = 0.0
    agreed: int = 0
    positions: int = 0

    def add(self, got: np.ndarray, want: np.ndarray, again: np.ndarray) -> None:
        """Adds rows of dew's output, of torch's, and of torch's other attention."""
        self.difference = max(self.difference, _largest(got - want))
        self.own = max(self.own, _largest(again - want))
        self.scale = max(self.scale, _largest(want))
        self.agreed += int((got.argmax(-1) == want.argmax(-1)).sum())
        self.positions += len(want)

    def logits(self, output: str, longest: int) -> Logits:
        """Returns the record of all rows added so far."""
        return Logits(
            output=output,
            largest_difference=self.difference,
            torch_own_difference=self.own,
            allowed=max(ABSOLUTE, RELATIVE * self.scale, OWN * self.own),
            scale=self.scale,
            argmax_agreement=self.agreed / self.positions,
            positions=self.positions,
            longest=longest,
        )


def _largest(values: np.ndarray) -> float:
    """Returns the largest magnitude; a NaN counts as infinite."""
    return float(np.nan_to_num(np.abs(values), nan=np.inf, posinf=np.inf).max())


def compare(loaded: Pretrained, reference: Any, probes: Iterable[Probe]) -> Logits:
    """Returns the comparison of the output that is furthest off.

    Furthest relative to what it is allowed. Every output of a lowered model is
    compared, and the logits or the final hidden states of a native one.
    """
    seen: dict[str, _OutputDifference] = {}
    longest = 0
    for probe in probes:
        # Torch twice: what its two attentions differ by is rounding that this model
        # magnifies, and so the measure of what dew may differ by.
        want = _torch_outputs(reference, probe, "eager")
        again = (
            _torch_outputs(reference, probe, "sdpa")
            if reference._supports_sdpa
            else want
        )
        got = _dew_outputs(loaded, reference, probe)
        # By name: dew leaves caches out, and torch the outputs of an encoder.
        for name in got.keys() & want.keys():
            rows = (_rows(side[name], probe) for side in (got, want, again))
            seen.setdefault(name, _OutputDifference()).add(*rows)
        longest = max(longest, probe.longest)
    compared = [one.logits(name, longest) for name, one in sorted(seen.items())]
    return max(compared, key=lambda one: one.largest_difference / one.allowed)


def _torch_outputs(model: Any, probe: Probe, attention: str) -> dict[str, np.ndarray]:
    """Returns torch's floating outputs by name, with that attention implementation."""
    model.set_attn_implementation(attention)
    points = CapturePoints(head=None, trunk=None, blocks=None)
    with torch.inference_mode():
        outputs = torch_outputs(model, torch_inputs(model, probe.inputs), points)
    # The decoder's outputs depend on its encoder's, so these need no comparison.
    return {
        name: tensor.numpy()
        for name, tensor in outputs.items()
        if tensor.is_floating_point() and not name.startswith("encoder_")
    }


def _dew_outputs(loaded: Pretrained, reference: Any, probe: Probe) -> Mapping[str, Any]:
    """Returns dew's outputs under torch's names."""
    match loaded.model:
        case Lowered() as lowered:
            return lowered.outputs(loaded.variables, probe.inputs)
    inputs = dict(probe.inputs)
    if reference.base_model is reference:
        inputs = jax.tree.map(jnp.asarray, inputs)
        final = loaded.model.apply(loaded.variables, inputs, method="hidden")
        return {"last_hidden_state": final}
    return {"logits": loaded.logits(inputs["tokens"], inputs["mask"])}


def _rows(output: jax.typing.ArrayLike, probe: Probe) -> np.ndarray:
    """Returns a row for each real position, or for each text with a single output."""
    values = np.asarray(output, np.float32)
    real = probe.real
    if real is not None and values.shape[:2] == real.shape:
        values = values[real]
        return values if values.ndim > 1 else values[:, None]
    return values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
