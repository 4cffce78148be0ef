"""What a LoRA adapter is asked to be: targets by torch's names, rank and scale."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dew.typing import PathFilter

ALL_LINEAR = "all-linear"

Names = str | Sequence[str]
"""Torch modules: a regular expression for whole names, or a list of their ends."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Settings of a LoRA adapter: W x + scale · B A x, A [rank, inputs], as in PEFT.

    >>> Lora(rank=16, alpha=32.0, targets=("q_proj", "v_proj")).targets
    ('q_proj', 'v_proj')
    >>> Lora(rank=0)
    Traceback (most recent call last):
    ValueError: ...rank must be >= 1, got 0...

    Attributes:
        rank: rank of each update.
        alpha: scale of the update times the rank: scale = alpha / rank.
        targets: ends of torch's module names, a regular expression that matches whole
            names, "all-linear" for every linear map but the output head, or a filter of
            variable paths.
        exclude: names taken out of the targets again.
        dropout: dropout rate of the adapter's input.
        rslora: whether scale = alpha / √rank instead (Kalajdzievski, 2023).
        to_save: modules trained whole, and stored in the adapter's folder.
        rank_pattern: rank of the modules whose names end with a key.
        alpha_pattern: alpha of the modules whose names end with a key.
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
        """The rank that a torch module's adapter has."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def alpha_of(self, module: str) -> float:
        """The alpha that a torch module's adapter has."""
        return _by_pattern(self.alpha_pattern, module, self.alpha)

    def scale(self, module: str) -> float:
        """What multiplies the adapter of a torch module."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (rank**0.5 if self.rslora else rank)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def matches(names: Names, module: str) -> bool:
    """Whether a torch module's name is one of those meant."""
    if type(names) is str:
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
