"""`dew pretrain`: load, train further on text, export, prove it."""

from dataclasses import dataclass

import jax
from rich.console import Console

from dew.cli.flags import Training, table
from dew.cli.load import load_to_train
from dew.cli.lora_flags import trained_by
from dew.cli.report import show
from dew.objectives.causal_lm import CausalLM


@dataclass(frozen=True, kw_only=True)
class Pretrain(Training):
    """Train a model further on text, and write it as a Hugging Face folder."""

    model: str
    """Hugging Face folder, hub id, or a run of ours."""

    def run(self) -> int:
        """Trains, exports, certifies and reports; the first process speaks for all."""
        console = Console(stderr=True, quiet=jax.process_index() > 0)
        source = load_to_train(
            self.model,
            dtype=self.dtype,
            road=self.road,
            remat=self.remat,
            stack=self.stack,
        )
        source = self.prepared(source)
        result = self.train(
            CausalLM(source=source, seq_len=self.seq_len, trainable=trained_by(source)),
            source,
            self.batches(source, console),
            sources=(source,),
            console=console,
        )
        del result["terms"]
        show(f"pretrained {source.address}", table(result), result, self.json)
        return 0
