"""Flags of a run that trains an adapter and leaves the weights as they are."""

from dataclasses import asdict, dataclass
from typing import Any

import jax

from dew.converters.lora.adapters import Adapted, adapt
from dew.converters.lora.config import ALL_LINEAR, Lora
from dew.converters.pretrained import Pretrained
from dew.typing import PathFilter


@dataclass(frozen=True, kw_only=True)
class LoraFlags:
    """What to adapt and how; without --lora-rank all weights are trained."""

    lora_rank: int | None = None
    """Train a LoRA adapter of this rank, and export it as PEFT's folder."""
    lora_alpha: float = 8.0
    """What it says is multiplied by alpha / rank."""
    lora_targets: tuple[str, ...] = (ALL_LINEAR,)
    """Ends of torch's module names such as q_proj v_proj, or all-linear."""
    lora_dropout: float = 0.0
    """Of the adapter's input, in training."""
    lora_rslora: bool = False
    """Multiply by alpha / √rank instead."""
    lora_save: tuple[str, ...] = ()
    """Modules to train whole, and keep with the adapter."""

    @property
    def chosen(self) -> Lora | None:
        """The adapter asked for."""
        if self.lora_rank is None:
            return None
        is_all = self.lora_targets == (ALL_LINEAR,)
        return Lora(
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            targets=ALL_LINEAR if is_all else self.lora_targets,
            dropout=self.lora_dropout,
            rslora=self.lora_rslora,
            to_save=self.lora_save,
        )

    def adapted(self, source: Pretrained, seed: int) -> Pretrained:
        """The model with a new adapter, or as it is where none is asked for."""
        if self.chosen is None:
            return source
        return adapt(source, self.chosen, key=jax.random.key(seed))

    def config(self) -> dict[str, Any] | None:
        """The adapter's settings as JSON."""
        return None if self.chosen is None else asdict(self.chosen)


def trained_by(source: Pretrained) -> PathFilter | None:
    """What of a model a run trains: all of it, or its adapter alone."""
    return source.is_trained if isinstance(source, Adapted) else None
