"""Command-line flags shared by every command that trains."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from jax.sharding import Mesh

from dew.api import Road
from dew.cli.inputs import not_positive, text_faults, too_small
from dew.cli.load import Bos, LoadOptions, Precision, Stack
from dew.cli.lora_flags import LoraFlags
from dew.converters.tied_weights import Tied
from dew.data import Packing
from dew.nn.decoder import Remat
from dew.runs import RunFolder
from dew.training.sharding import Placement, make_mesh, placement
from dew.training.trackers import TRACKERS

OnOff = Literal["on", "off"]


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Flags of a run that trains on text and exports the trained model.

    The line under a field is its line of `--help`; `dew.cli.train` is the run.
    """

    data: tuple[str, ...]
    """Training text: .txt, .jsonl or .parquet files, or folders of them."""
    out: Path
    """Run folder: run.json, checkpoints, logs, export."""
    eval_data: tuple[str, ...] = ()
    """Held-out text: scored before and after training and every --eval-every steps."""
    steps: int = 1000
    """Number of optimizer updates."""
    batch_size: int = 8
    """Rows of a micro-batch, over all devices."""
    seq_len: int = 1024
    """Tokens per row."""
    accumulation: int = 1
    """Micro-batches accumulated into one optimizer update."""
    learning_rate: float = 5e-5
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning-rate schedule after warm-up."""
    warmup: int = 0
    """Warm-up steps, in which the learning rate rises linearly from 0 to its peak."""
    optimizer: Literal["adamw", "lion", "sgd", "adafactor", "muon"] = "adamw"
    """Optimizer of the trained weights."""
    weight_decay: float = 0.0
    """Decoupled weight decay, applied to all weights but biases and norms."""
    clip_norm: float = 1.0
    """Maximum global norm of the gradient."""
    seed: int = 0
    """Random seed for the data order and for dropout."""
    dtype: Precision = "float32"
    """Precision of the forward and backward pass; weights are trained in float32."""
    road: Road = "auto"
    """How the model is loaded into JAX; auto is native where it can, else lowered."""
    tied: Tied | None = None
    """Side that counts where config.json and the weights disagree about a tied head."""
    dequantise: bool = False
    """Read a quantised model through a plain copy of it."""
    ignore_fields: tuple[str, ...] = ()
    """Fields of config.json to ignore although transformers reads them."""
    remat: Remat = "none"
    """Activations recomputed in the backward pass, to save memory."""
    stack: Stack = "auto"
    """Blocks unrolled, or scanned as one loop; auto unrolls on a CPU."""
    packing: Packing = "wrapped"
    """Packing of documents into rows: wrapped pads nothing, best_fit splits no document
    that fits into a row, apart puts one document in each row."""
    bos: Bos = "auto"
    """Beginning-of-text tokens before every document: auto as the tokenizer's template
    has them, always, or never."""
    text_field: str = "text"
    """Name of the text field in .jsonl and .parquet records."""
    lora: LoraFlags = field(default_factory=LoraFlags)
    """LoRA adapter; without --lora-rank all weights are trained."""
    pad_vocab: int = 1
    """Multiple to which the vocabulary's rows are padded while training, so that they
    can be sharded evenly; exports have no padding."""
    fsdp: int = 1
    """Number of devices over which weights are sharded."""
    tensor: int = 1
    """Number of devices over which each layer is split."""
    log_every: int = 10
    """Steps between log lines."""
    eval_every: int | None = None
    """Steps between evaluations; by default only before and after training."""
    checkpoint_every: int = 500
    """Steps between checkpoints; one is always saved after the last step."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; with two, a damaged one is replaced by its elder."""
    verify_checkpoints: OnOff = "on"
    """Whether a checkpoint is compared with its checksums when it is read."""
    track: tuple[str, ...] = ()
    """Trackers beside logs/metrics.jsonl: tensorboard, wandb, trackio."""
    profile: Path | None = None
    """Folder for a trace by jax's profiler, taken of the second step."""
    resume: bool = False
    """Resume from the newest checkpoint in --out."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of a table."""

    def faults(self) -> list[str]:
        """Returns what is wrong with these flags and files, before any model loads."""
        ones = ("steps", "batch_size", "accumulation", "log_every", "eval_every")
        faults = too_small(self, 1, *ones, "checkpoint_every", "pad_vocab", "fsdp")
        faults += too_small(self, 1, "tensor", "keep_checkpoints") + too_small(
            self, 2, "seq_len"
        )
        faults += too_small(self, 0, "warmup", "weight_decay", "seed")
        faults += not_positive(self, "learning_rate", "clip_norm")
        if not faults and self.warmup > self.steps:
            faults.append(
                f"--warmup must be at most the {self.steps} --steps, got {self.warmup}"
            )
        faults += [
            f"--track: no tracker is called {name!r}; choose from {', '.join(TRACKERS)}"
            for name in self.track
            if name not in TRACKERS
        ]
        faults += self.lora.faults()
        if self.eval_data:
            faults += text_faults("--eval-data", self.eval_data)
        # The adapter's settings are part of the record, so they must be valid.
        config = None if self.lora.faults() else self.config()
        done = RunFolder(self.out).steps_done if self.resume else 0
        if done > self.steps:
            faults.append(
                f"--steps must be at least the {done} steps that {self.out} has done, "
                f"got {self.steps}"
            )
        run = RunFolder(self.out).refusal(resume=self.resume, config=config)
        return [*faults, *([] if run is None else [f"--out: {run}"])]

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of all devices by --fsdp and --tensor; None for a single device."""
        count = len(jax.devices())
        if count == 1:
            return None
        ways = count // (self.fsdp * self.tensor)
        return make_mesh(data=ways, fsdp=self.fsdp, tensor=self.tensor)

    @property
    def placement(self) -> Placement | None:
        """Shardings of weights that are split; None where each device has them all."""
        if self.mesh is None or self.fsdp * self.tensor == 1:
            return None
        return placement(self.mesh)

    @property
    def loading(self) -> LoadOptions:
        """Arguments of `load_to_train` that are the same for every model of a run."""
        return {
            "dtype": self.dtype,
            "tied": self.tied,
            "dequantise": self.dequantise,
            "ignore_fields": self.ignore_fields,
            "shardings": self.placement,
        }

    def config(self) -> dict[str, object]:
        """Returns the flags as JSON values, as they are recorded in run.json."""
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }
        return {**settings, "lora": self.lora.config()}
