"""How far two forwards of one model are apart: torch's and ours."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
    """How far two forwards are apart, in float32, where they are furthest.

    `output` is the torch name of what is compared: logits, or of a model without a
    head its states. `torch_own_difference` is what torch's `eager` and `sdpa` attention
    differ by. `scale` is the largest value; `argmax_agreement` the share of positions
    whose likeliest token is the same.
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
    """What one output came to over all probes so far."""

    difference: float = 0.0
    own: float = 0.0
    scale: float = 0.0
    agreed: int = 0
    positions: int = 0

    def add(self, got: np.ndarray, want: np.ndarray, again: np.ndarray) -> None:
        """Takes in rows of ours, of torch's, and of torch's other attention."""
        self.difference = max(self.difference, _largest(got - want))
        self.own = max(self.own, _largest(again - want))
        self.scale = max(self.scale, _largest(want))
        self.agreed += int((got.argmax(-1) == want.argmax(-1)).sum())
        self.positions += len(want)

    def logits(self, output: str, longest: int) -> Logits:
        """The same as what is told of it."""
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
    """The largest magnitude; a NaN is larger than all."""
    return float(np.nan_to_num(np.abs(values), nan=np.inf, posinf=np.inf).max())


def compare(ours: Pretrained, theirs: Any, probes: Iterable[Probe]) -> Logits:
    """Returns the comparison of the output that is furthest off, for what it may be.

    Every output of a lowered model is compared, and the logits or the final states of
    a native one.
    """
    seen: dict[str, _OutputDifference] = {}
    longest = 0
    for probe in probes:
        want = _torch_outputs(theirs, probe, "eager")
        again = _torch_outputs(theirs, probe, "sdpa") if theirs._supports_sdpa else want
        got = _dew_outputs(ours, theirs, probe)
        for name in got.keys() & want.keys():
            rows = (_rows(side[name], probe) for side in (got, want, again))
            seen.setdefault(name, _OutputDifference()).add(*rows)
        longest = max(longest, probe.longest)
    compared = [one.logits(name, longest) for name, one in sorted(seen.items())]
    return max(compared, key=lambda found: found.largest_difference / found.allowed)


def _torch_outputs(model: Any, probe: Probe, way: str) -> dict[str, np.ndarray]:
    """Torch's answers, by the attention of that name."""
    model.set_attn_implementation(way)
    where = CapturePoints(head=None, trunk=None, blocks=None)
    with torch.inference_mode():
        said = torch_outputs(model, torch_inputs(model, probe.inputs), where)
    # A decoder's answers show what its encoder gave it.
    return {
        name: tensor.numpy()
        for name, tensor in said.items()
        if tensor.is_floating_point() and not name.startswith("encoder_")
    }


def _dew_outputs(ours: Pretrained, theirs: Any, probe: Probe) -> Mapping[str, Any]:
    """Our answers, by torch's names."""
    match ours.model:
        case Lowered() as lowered:
            return lowered.outputs(ours.variables, probe.inputs)
    inputs = dict(probe.inputs)
    if theirs.base_model is theirs:
        final = ours.model.apply(ours.variables, inputs, method="hidden")
        return {"last_hidden_state": final}
    return {"logits": ours.logits(inputs["tokens"], inputs["mask"])}


def _rows(said: Any, probe: Probe) -> np.ndarray:
    """A row for each real position, or for each text where a text has one answer."""
    said = np.asarray(said, np.float32)
    real = probe.real
    if real is not None and said.shape[:2] == real.shape:
        said = said[real]
        return said if said.ndim > 1 else said[:, None]
    return said.reshape(-1, said.shape[-1] if said.ndim > 1 else 1)
