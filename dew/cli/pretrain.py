"""`dew pretrain`: continued training of a model on text, exported and certified."""

from dataclasses import dataclass

import jax
from rich.console import Console

from dew.cli.flags import TrainingFlags
from dew.cli.inputs import model_faults, refuse, text_faults, too_small
from dew.cli.load import load_to_train
from dew.cli.lora_flags import trained_by
from dew.cli.report import show
from dew.cli.train import open_texts, prepare_model, text_batches, train
from dew.objectives.causal_lm import CausalLM
from dew.objectives.router_loss import RouterLossLM


@dataclass(frozen=True, kw_only=True)
class Pretrain(TrainingFlags):
    """Train a model further on text, and write it as a Hugging Face folder."""

    model: str
    """Model to train: a Hugging Face folder, a hub id, or the folder of a dew run."""
    router_loss: float | None = None
    """Coefficient of the load-balancing loss of a mixture's routers; by default that of
    its config (output_router_logits), 0 for none."""

    def check(self) -> None:
        """Raises one ValueError that names every fault of flags and files."""
        faults = text_faults("--data", self.data)
        faults += model_faults(
            "--model",
            self.model,
            road=self.road,
            ignore_fields=self.ignore_fields,
            needs_tokenizer=True,
            needs_head=True,
            seq_len=self.seq_len,
        )
        faults += too_small(self, 0, "router_loss")
        refuse([*faults, *self.faults()])

    def run(self) -> int:
        """Trains, exports, certifies and reports; only the first process prints."""
        console = Console(stderr=True, quiet=jax.process_index() > 0)
        given = open_texts(self, console)
        source = load_to_train(
            self.model,
            road=self.road,
            remat=self.remat,
            stack=self.stack,
            **self.loading,
        )
        source = prepare_model(self, source)
        lm = CausalLM(
            source=source,
            seq_len=self.seq_len,
            trainable=trained_by(source),
            router_loss=self.router_loss,
        )
        if lm.router_coefficient:
            console.print(
                "training adds the router loss with coefficient "
                f"{lm.router_coefficient:g}; --router-loss 0 leaves it out"
            )
        result = train(
            self,
            RouterLossLM(lm=lm) if lm.router_coefficient else lm,
            source,
            text_batches(self, source, given.training, console),
            held_out=given.held_out,
            sources={"model": source},
            console=console,
        )
        report = result.json()
        del report["terms"]
        show(f"pretrained {source.address}", result.rows(), report, self.json)
        return 0
