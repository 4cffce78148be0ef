"""Settings of a LoRA adapter: its targets, rank and scale."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dew.typing import PathFilter

ALL_LINEAR = "all-linear"

Names = str | Sequence[str]
"""Names of torch modules: a regular expression for whole names, or a list of ends."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Settings of LoRA adapters W x + scale · B A x, with scale = alpha / rank.

    A is [rank, inputs] and B [outputs, rank] (Hu et al., 2021). Fields mean what PEFT's
    `LoraConfig` means by them.

        >>> import dew
        >>> lora = dew.Lora(rank=16, alpha=32.0, targets=("q_proj", "v_proj"))
        >>> lora.scale("model.layers.0.self_attn.q_proj")
        2.0

    Attributes:
        rank: rows of A and columns of B.
        alpha: numerator of the scale.
        targets: ends of torch's module names (`("q_proj", "v_proj")`), a regular
            expression that matches whole names, "all-linear" for every linear map
            except the output head, or a filter of the paths of dew's variables.
        exclude: modules that are left out of the targets, by ends of their names or
            a regular expression.
        dropout: dropout rate of the adapter's inputs.
        rslora: whether the scale is alpha / √rank (Kalajdzievski, 2023).
        to_save: modules of which all weights are trained, and written into the
            adapter's folder.
        rank_pattern: rank by a regular expression for ends of module names.
        alpha_pattern: alpha by a regular expression for ends of module names.

    Raises:
        ValueError: a rank is less than 1, or dropout is outside [0, 1).
    """

    rank: int = 8
    alpha: float = 8.0
    targets: Names | PathFilter = ALL_LINEAR
    exclude: Names = ()
    dropout: float = 0.0
    rslora: bool = False
    to_save: Sequence[str] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = {"rank": self.rank, **self.rank_pattern}
        faults = [f"{n} must be >= 1, got {r}" for n, r in ranks.items() if r < 1]
        if not 0 <= self.dropout < 1:
            faults.append(f"dropout must be in [0, 1), got {self.dropout}")
        if faults:
            raise ValueError("Lora: " + "; ".join(faults))

    def rank_of(self, module: str) -> int:
        """Returns the rank of a torch module's adapter."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def alpha_of(self, module: str) -> float:
        """Returns the alpha of a torch module's adapter."""
        return _by_pattern(self.alpha_pattern, module, self.alpha)

    def scale(self, module: str) -> float:
        """Returns the factor of B A x in a torch module's adapter."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (rank**0.5 if self.rslora else rank)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def matches(names: Names, module: str) -> bool:
    """Whether a torch module's name matches the pattern, or one of the ends."""
    if type(names) is str:
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
