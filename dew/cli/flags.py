"""Flags that every command that trains shares."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console

from dew import api as roads
from dew.api import Road
from dew.cli.load import Precision, Stack, eos_of, texts, tokenizer_of
from dew.cli.lora_flags import LoraFlags
from dew.cli.report import Display
from dew.converters.pretrained import Pretrained
from dew.converters.surgery.vocabulary import pad_vocabulary
from dew.data import Batches, Packing, evaluation_batches, training_batches
from dew.nn.decoder import Decoder, Remat
from dew.objectives.base import Objective
from dew.objectives.metrics import token_metrics
from dew.runs import RunFolder
from dew.training.checkpoint import Checkpoints
from dew.training.evaluation import Evaluation
from dew.training.logs import Log
from dew.training.optimizers import OPTIMIZERS
from dew.training.schedules import named as schedule_named
from dew.training.sharding import make_mesh
from dew.training.throughput import (
    Meter,
    flops_per_token,
    peak_flops,
    peak_memory_bytes,
)
from dew.training.trackers import named as tracker_named
from dew.training.trackers import several
from dew.training.trainer import Trainer
from dew.tree import flatten
from dew.typing import Batch


@dataclass(frozen=True, kw_only=True)
class Training:
    """Flags of every run that trains on text and exports what it made."""

    data: tuple[str, ...]
    """Text to train on: .txt, .jsonl or .parquet files, or folders of them."""
    out: Path
    """The run's folder: run.json, checkpoints, logs, export."""
    eval_data: tuple[str, ...] = ()
    """Text held out: scored before and after, and every --eval-every steps."""
    steps: int = 1000
    """Optimizer updates."""
    batch_size: int = 8
    """Rows of a microbatch, over all devices."""
    seq_len: int = 1024
    """Tokens of a row."""
    accumulation: int = 1
    """Microbatches of one step."""
    learning_rate: float = 5e-5
    """The schedule's highest."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate goes on after its warm-up."""
    warmup: int = 0
    """Steps in which it rises."""
    optimizer: Literal["adamw", "lion", "sgd", "adafactor", "muon"] = "adamw"
    """The update rule."""
    weight_decay: float = 0.0
    """Decoupled, on all but biases and norms."""
    clip_norm: float = 1.0
    """The largest global norm that gradients keep."""
    seed: int = 0
    """Of the data's order and of dropout."""
    dtype: Precision = "float32"
    """What the model computes in; weights are trained in float32."""
    road: Road = "auto"
    """The way into JAX; auto takes the native one, lowered where there is none."""
    remat: Remat = "none"
    """What the backward pass computes again, to save memory."""
    stack: Stack = "auto"
    """How blocks run: unrolled, or scanned as one loop; auto unrolls on a CPU."""
    packing: Packing = "wrapped"
    """wrapped wastes nothing, best_fit keeps documents whole, apart has one a row."""
    text_field: str = "text"
    """The field of .jsonl and .parquet records that holds the text."""
    lora: LoraFlags = field(default_factory=LoraFlags)
    """An adapter in place of the weights."""
    pad_vocab: int = 1
    """Split the tables of tokens evenly by rows up to a multiple; exports lack them."""
    fsdp: int = 1
    """Devices that weights are split over."""
    tensor: int = 1
    """Devices that each layer is split over."""
    log_every: int = 10
    """Steps between logs."""
    eval_every: int | None = None
    """Steps between evaluations; by default only before and after."""
    checkpoint_every: int = 500
    """Steps between checkpoints; there is one after the last as well."""
    track: tuple[str, ...] = ()
    """Trackers beside logs/metrics.jsonl: tensorboard, wandb, trackio."""
    profile: Path | None = None
    """A folder for jax's profiler, which watches the second step."""
    resume: bool = False
    """Go on from the newest checkpoint in --out."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object and no table."""

    def prepared(self, source: Pretrained) -> Pretrained:
        """The model to train with its padding and its adapter, as far as asked for."""
        if self.pad_vocab != 1:
            source = pad_vocabulary(source, self.pad_vocab)
        return self.lora.adapted(source, self.seed)

    def batches(self, source: Pretrained, console: Console) -> Batches:
        """Training batches of the text, in the tokens of the model to be trained."""
        return training_batches(
            texts(self.data, field=self.text_field, console=console),
            batch_size=self.batch_size,
            seed=self.seed,
            shard=(jax.process_index(), jax.process_count()),
            **self.rows(source),
        )

    def train(
        self,
        objective: Objective[Any, Any],
        source: Pretrained,
        data: Iterator[Batch],
        *,
        sources: Sequence[Pretrained],
        console: Console,
        hashes: Mapping[str, str] | None = None,
        derived: Callable[[Log], Mapping[str, float]] | None = None,
    ) -> dict[str, Any]:
        """Trains, exports and certifies; returns the run in figures.

        `source` is the model that is trained and exported, `sources` are all whose
        weights the run depends on; `hashes` those of others, by address. `derived` adds
        to every log.
        """
        evaluations = self._evaluations(source, console)
        folder = RunFolder(self.out)
        bound = {one.address: one.content_hash for one in sources} | dict(hashes or {})
        folder.begin(self._config(), bound, resume=self.resume)
        trainer, display = self._trainer(objective, source, folder, console)
        trainer = replace(trainer, derived=derived)
        state = trainer.fit(
            data,
            steps=self.steps,
            log_every=self.log_every,
            evaluations=evaluations,
            eval_every=self.eval_every,
            eval_on_start=True,
            resume=self.resume,
            profile=self.profile,
        )
        task = objective.pipeline(state, ema=state.ema is not None)
        course = self._course(display)
        certificate = roads.save_certified(
            task, folder.export, run=course, console=console, overwrite=True
        )
        proof = None if certificate is None else certificate.json()
        return {**course, "export": str(folder.export), "certificate": proof}

    def rows(self, source: Pretrained) -> dict[str, Any]:
        """How text becomes rows, in training and in evaluation alike."""
        return {
            "tokenizer": tokenizer_of(source),
            "seq_len": self.seq_len,
            "packing": self.packing,
            "eos_id": eos_of(source),
        }

    def _trainer(
        self,
        objective: Objective[Any, Any],
        source: Pretrained,
        folder: RunFolder,
        console: Console,
    ) -> tuple[Trainer, Display]:
        """The run's machinery, and what shows and remembers its course."""
        rate = schedule_named(
            self.schedule, self.learning_rate, steps=self.steps, warmup=self.warmup
        )
        optimizer = OPTIMIZERS[self.optimizer](
            rate, weight_decay=self.weight_decay, clip_norm=self.clip_norm
        )
        devices = jax.devices()
        meter = Meter(
            flops=_flops(source, self.seq_len),
            peak=peak_flops([device.device_kind for device in devices]),
        )
        display = Display(console, meter)
        is_split = len(devices) > 1 or jax.process_count() > 1
        ways = len(devices) // (self.fsdp * self.tensor)
        trackers = ("jsonl", *self.track)
        trainer = Trainer(
            objective,
            optimizer,
            key=jax.random.key(self.seed),
            mesh=make_mesh(data=ways, fsdp=self.fsdp, tensor=self.tensor)
            if is_split
            else None,
            accumulation=self.accumulation,
            checkpoints=Checkpoints(folder.checkpoints, every=self.checkpoint_every),
            tracker=several(*(tracker_named(t, folder.logs) for t in trackers)),
            run_config=self._config(),
            callbacks=(display,),
        )
        return trainer, display

    def _evaluations(
        self, source: Pretrained, console: Console
    ) -> dict[str, Evaluation]:
        if not self.eval_data:
            return {}
        held_out = texts(self.eval_data, field=self.text_field, console=console)
        shard = (jax.process_index(), jax.process_count())
        rows = {**self.rows(source), "batch_size": self.batch_size, "shard": shard}
        return {
            HELD_OUT: Evaluation(
                batches=lambda: evaluation_batches(held_out, **rows),
                metrics=token_metrics(),
            )
        }

    def _config(self) -> dict[str, Any]:
        """The settings as JSON."""
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }
        return {**settings, "lora": self.lora.config()}

    def _course(self, display: Display) -> dict[str, Any]:
        """The run in figures."""
        passes = display.evaluations
        return {
            "steps": self.steps,
            "tokens": display.tokens,
            "losses": display.losses,
            "terms": display.terms,
            "tokens_per_second": display.meter.tokens_per_second,
            "first_step_seconds": display.meter.first_step_seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "eval": {
                "before": _of_held_out(passes.get(0)),
                "after": _of_held_out(passes.get(self.steps)),
            },
        }


HELD_OUT = "held_out"
"""The name of the one validation set."""


def _of_held_out(metrics: Mapping[str, float] | None) -> dict[str, float] | None:
    """A pass's numbers without the set's name."""
    if metrics is None:
        return None
    return {name.removeprefix(f"{HELD_OUT}/"): x for name, x in metrics.items()}


def _flops(source: Pretrained, seq_len: int) -> float | None:
    """What one token costs, where the model is a native decoder."""
    if not isinstance(source.model, Decoder):
        return None
    c = source.model.config
    sizes = {path: leaf.size for path, leaf in flatten(source.variables).items()}
    # An untied input table is read, not multiplied.
    table = 0 if c.head.tied else sizes["params", "embed", "weight"]
    cost = flops_per_token(
        sum(sizes.values()) - table,
        layers=c.layers,
        attention_width=c.attention.heads * c.attention.head_dim,
        seq=seq_len,
    )
    return float(cost)


def table(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A run's figures as rows for people."""
    before, after = result["eval"]["before"], result["eval"]["after"]
    certificate, speed = result["certificate"], result["tokens_per_second"]
    rows = [("steps", f"{result['steps']}"), ("tokens", f"{result['tokens']:,}")]
    if result["losses"]:
        first, last = result["losses"][0], result["losses"][-1]
        rows.append(("training loss", f"{first:.4f} → {last:.4f}"))
    if before and after:
        fell = f"{before['perplexity']:.3f} → {after['perplexity']:.3f}"
        rows.append(("held-out perplexity", fell))
    if speed is not None:
        rows.append(("tokens per second", f"{speed:,.0f}"))
    rows.append(("peak memory", f"{result['peak_memory_bytes'] / 2**30:.2f} GiB"))
    if certificate is not None:
        keys = [len(certificate[k]) for k in ("missing", "unexpected", "mismatched")]
        found = certificate["logits"]["largest_difference"]
        rows.append(("missing, unexpected, mismatched keys", ", ".join(map(str, keys))))
        rows.append(("largest logit difference from torch", f"{found:.2g}"))
    rows.append(("export", result["export"]))
    return rows
