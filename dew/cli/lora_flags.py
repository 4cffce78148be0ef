"""Flags of a LoRA adapter, trained while the model's weights stay frozen."""

from dataclasses import asdict, dataclass, fields

import jax

from dew.cli.inputs import flag, not_positive
from dew.converters.lora import adapters
from dew.converters.lora.config import ALL_LINEAR, Lora
from dew.converters.pretrained import Pretrained
from dew.typing import PathFilter


@dataclass(frozen=True, kw_only=True)
class LoraFlags:
    """Settings of a LoRA adapter; without --lora-rank all weights are trained."""

    lora_rank: int | None = None
    """Rank of the LoRA adapter, which is exported as a PEFT folder."""
    lora_alpha: float = 8.0
    """LoRA alpha; the adapter's output is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = (ALL_LINEAR,)
    """Modules to adapt, by suffix of their torch names, for example q_proj v_proj; or
    all-linear."""
    lora_dropout: float = 0.0
    """Dropout probability of the adapter's input in training."""
    lora_rslora: bool = False
    """Rank-stabilised LoRA: scale the adapter's output by alpha / √rank."""
    lora_save: tuple[str, ...] = ()
    """Modules trained in full and saved with the adapter, by suffix of their names."""

    @property
    def settings(self) -> Lora | None:
        """Settings of the adapter; None without --lora-rank."""
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

    def faults(self) -> list[str]:
        """Returns what is wrong with the settings, or that they lack a rank."""
        if self.lora_rank is None:
            given = [
                flag(field.name)
                for field in fields(self)
                if getattr(self, field.name) != field.default
            ]
            return [f"{', '.join(given)} need --lora-rank"] if given else []
        try:
            settings = self.settings
        except ValueError as fault:
            return [f"--lora-rank and its like: {fault}"]
        return [] if settings is None else not_positive(self, "lora_alpha")

    def adapt(self, source: Pretrained, seed: int) -> Pretrained:
        """Returns the model with a new adapter, or unchanged without --lora-rank."""
        if self.settings is None:
            return source
        return adapters.adapt(source, self.settings, key=jax.random.key(seed))

    def config(self) -> dict[str, object] | None:
        """Returns the settings as JSON values, as they are recorded in run.json."""
        return None if self.settings is None else asdict(self.settings)


def trained_by(source: Pretrained) -> PathFilter | None:
    """Returns the filter of trained variables: the adapter's, or None for all."""
    return source.is_trained if isinstance(source, adapters.Adapted) else None
