"""Throughput, FLOPs and peak memory of a training run."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import jax

PEAK_FLOPS: Mapping[str, float] = {
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
"""Dense bfloat16 FLOP/s from the makers' data sheets, by prefix of `device_kind`."""


def flops_per_token(
    parameters: int, *, layers: int = 0, attention_width: int = 0, seq: int = 0
) -> int:
    """Returns the FLOPs of a token's forward and backward pass.

    6N + 12 · layers · width · seq: Chowdhery et al., "PaLM" (2022), appendix B, where
    attention counts in full, causal or not. `parameters` are those that multiply
    activations: all but an input table that is not also the head. `attention_width` is
    heads times head_dim.
    """
    return 6 * parameters + 12 * layers * attention_width * seq


def peak_flops(kinds: Sequence[str]) -> float | None:
    """Returns the devices' total peak FLOP/s; None where one is not in the table.

    `kinds` are their `device_kind`s; the longest entry that is a prefix applies.
    """
    peaks = [_peak(kind) for kind in kinds]
    listed = [peak for peak in peaks if peak is not None]
    return sum(listed) if listed and len(listed) == len(peaks) else None


def peak_memory_bytes() -> int:
    """Returns the peak memory so far: of the fullest device, or of the process.

    Where devices report none, as CPUs, it is the process's resident memory; 0 on a
    system that does not report that either.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    used = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return max(used) if used else _peak_resident_bytes()


class Meter:
    """Times a run by laps: intervals of steps whose values have reached the host.

    The first lap should be one step, for it includes the compilation: it gives
    `first_step_seconds` and is left out of the median. `flops` are those of one token,
    `peak` the FLOP/s of all devices; without both, no MFU is computed.
    """

    def __init__(
        self,
        *,
        flops: float | None = None,
        peak: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._flops, self._peak, self._clock = flops, peak, clock
        self._rates: list[float] = []
        self.first_step_seconds: float | None = None
        self.restart()

    def restart(self) -> None:
        """Starts a new lap, so that an evaluation's time counts in none."""
        self._since = self._clock()

    def lap(self, *, steps: int, tokens: int) -> None:
        """Ends a lap of `steps` commits over `tokens` tokens, and starts the next."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        if self.first_step_seconds is None:
            self.first_step_seconds = seconds / steps
        else:
            self._rates.append(tokens / seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """The median over laps after the first; None before the second lap ends."""
        return median(self._rates) if self._rates else None

    def metrics(self) -> dict[str, float]:
        """Returns the last lap's `tokens_per_second`, and its `mfu` if computable."""
        if not self._rates:
            return {}
        rate = self._rates[-1]
        if self._flops is None or self._peak is None:
            return {"tokens_per_second": rate}
        return {"tokens_per_second": rate, "mfu": rate * self._flops / self._peak}


def _peak(kind: str) -> float | None:
    matches = [name for name in PEAK_FLOPS if kind.startswith(name)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


def _peak_resident_bytes() -> int:
    # Linux's own account first: ru_maxrss survives exec, so that a small process which
    # a large one started would report its parent's peak.
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(
            line.split(":", 1)
            for line in status.read_text().splitlines()
            if ":" in line
        )
        return int(fields["VmHWM"].split()[0]) * 1024
    if sys.platform == "win32":
        return 0
    import resource

    # Bytes on macOS, which has no /proc; the other systems count kibibytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
