"""A training run from the command line: data, trainer, export and certificate."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import jax
from rich.console import Console
from tokenizers import Tokenizer

from dew import api
from dew.cli.flags import TrainingFlags
from dew.cli.load import announce_ends, bos_of, eos_of, texts, tokenizer_of
from dew.cli.report import Display
from dew.converters.pretrained import Pretrained
from dew.converters.surgery.vocabulary import pad_vocabulary
from dew.data import Batches, Packing, evaluation_batches, training_batches
from dew.data.documents import Documents
from dew.nn.decoder import Decoder
from dew.objectives.base import AnyObjective
from dew.objectives.metrics import token_metrics
from dew.runs import RunFolder, TrainedModel
from dew.training.checkpoint import Checkpoints, Keep
from dew.training.evaluation import Evaluation
from dew.training.logs import Log
from dew.training.optimizers import OPTIMIZERS
from dew.training.schedules import schedule_by_name
from dew.training.throughput import (
    Meter,
    flops_per_token,
    peak_flops,
    peak_memory_bytes,
)
from dew.training.trackers import join_trackers, tracker_by_name
from dew.training.trainer import Trainer
from dew.tree import flatten
from dew.typing import Batch

HELD_OUT = "held_out"
"""Name of the validation set of --eval-data."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Figures of a finished run, with its export and the export's certificate."""

    figures: Mapping[str, Any]
    """Steps, tokens, losses and speed, under the keys of `--json`."""
    export: str
    """Folder of the exported model."""
    certificate: Mapping[str, Any] | None
    """The certificate as JSON; None where torch is not installed."""

    def json(self) -> dict[str, object]:
        """Returns everything as JSON values."""
        return {
            **self.figures,
            "export": self.export,
            "certificate": self.certificate,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Returns the figures as rows of a table, for people."""
        figures, certificate = self.figures, self.certificate
        before, after = figures["eval"]["before"], figures["eval"]["after"]
        losses, speed = figures["losses"], figures["tokens_per_second"]
        rows = [("steps", f"{figures['steps']}"), ("tokens", f"{figures['tokens']:,}")]
        if losses:
            rows.append(("training loss", f"{losses[0]:.4f} → {losses[-1]:.4f}"))
        if before and after:
            change = f"{before['perplexity']:.3f} → {after['perplexity']:.3f}"
            rows.append(("held-out perplexity", change))
        if speed is not None:
            rows.append(("tokens per second", f"{speed:,.0f}"))
        rows.append(("peak memory", f"{figures['peak_memory_bytes'] / 2**30:.2f} GiB"))
        if certificate is not None:
            keys = ("missing", "unexpected", "mismatched")
            counts = ", ".join(str(len(certificate[key])) for key in keys)
            difference = certificate["logits"]["largest_difference"]
            rows.append(("missing, unexpected, mismatched keys", counts))
            rows.append(("largest logit difference from torch", f"{difference:.2g}"))
        rows.append(("export", self.export))
        return rows


def prepare_model(flags: TrainingFlags, source: Pretrained) -> Pretrained:
    """Returns the model to train: with padding and a LoRA adapter by its flags."""
    if flags.pad_vocab != 1:
        source = pad_vocabulary(source, flags.pad_vocab, shardings=flags.placement)
    return flags.lora.adapt(source, flags.seed)


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The documents of a run; those not named on the command line are None."""

    training: Documents | None
    """The documents of --data."""
    held_out: Documents | None
    """The documents of --eval-data."""


def open_texts(flags: TrainingFlags, console: Console) -> Texts:
    """Opens the text of a run, so that a fault in it is found before a model loads."""
    opened = [
        texts(paths, field=flags.text_field, console=console) if paths else None
        for paths in (flags.data, flags.eval_data)
    ]
    return Texts(training=opened[0], held_out=opened[1])


def text_batches(
    flags: TrainingFlags,
    source: Pretrained,
    documents: Documents | None,
    console: Console,
) -> Batches:
    """Returns training batches of documents, in the tokens of the model to train.

    Prints the tokens that begin and end a document.
    """
    if documents is None:
        raise ValueError("--data names no file or folder")
    announce_ends(source, flags.bos, console)
    return training_batches(documents, seed=flags.seed, **_row_options(flags, source))


def train(
    flags: TrainingFlags,
    objective: AnyObjective,
    source: Pretrained,
    data: Iterator[Batch],
    *,
    held_out: Documents | None,
    sources: Mapping[str, Pretrained],
    console: Console,
    hashes: Mapping[str, str] | None = None,
    derived: Callable[[Log], Mapping[str, float]] | None = None,
) -> TrainingResult:
    """Trains, exports and certifies a model.

    Args:
        flags: settings of the run, recorded in its run.json.
        objective: loss over the model's variables.
        source: the model that is trained and exported.
        data: training batches.
        held_out: documents of --eval-data, None without any.
        sources: all models whose weights the run depends on, by the flag that has
            their address; a resumed run must have the same weights.
        console: receives progress and messages.
        hashes: content hashes by flag, of weights that are not in `sources`.
        derived: metrics computed from each log and added to it.
    """
    evaluations = _evaluations(flags, source, held_out)
    folder = RunFolder(flags.out)
    dependencies = {name: model.content_hash for name, model in sources.items()}
    folder.begin(
        flags.config(),
        dependencies | dict(hashes or {}),
        model=TrainedModel(
            address=_kept_address(source.address),
            pad_vocab=flags.pad_vocab,
            lora=flags.lora.config(),
            road=source.road,
            tied=flags.tied,
            dequantise=flags.dequantise,
            ignore_fields=flags.ignore_fields,
        ),
        resume=flags.resume,
    )
    trainer, display = _trainer(flags, objective, source, folder, console)
    state = replace(trainer, derived=derived).fit(
        data,
        steps=flags.steps,
        log_every=flags.log_every,
        evaluations=evaluations,
        eval_every=flags.eval_every,
        eval_on_start=True,
        resume=flags.resume,
        profile=flags.profile,
    )
    task = objective.pipeline(state, ema=state.ema is not None)
    figures = _figures(flags, display)
    certificate = api.save_certified(
        task, folder.export, run=figures, console=console, overwrite=True
    )
    return TrainingResult(
        figures=figures,
        export=str(folder.export),
        certificate=None if certificate is None else certificate.json(),
    )


def _kept_address(address: str) -> str:
    """Returns an address that names the same model from any working folder."""
    path = Path(address).expanduser()
    return str(path.absolute()) if path.exists() else address


class _RowOptions(TypedDict):
    tokenizer: Tokenizer
    seq_len: int
    batch_size: int
    packing: Packing
    bos_id: tuple[int, ...]
    eos_id: int | None
    shard: tuple[int, int]


def _row_options(flags: TrainingFlags, source: Pretrained) -> _RowOptions:
    """How text becomes rows, in training and in evaluation alike."""
    return {
        "tokenizer": tokenizer_of(source),
        "seq_len": flags.seq_len,
        "batch_size": flags.batch_size,
        "packing": flags.packing,
        "bos_id": bos_of(source, flags.bos),
        "eos_id": eos_of(source),
        "shard": (jax.process_index(), jax.process_count()),
    }


def _trainer(
    flags: TrainingFlags,
    objective: AnyObjective,
    source: Pretrained,
    folder: RunFolder,
    console: Console,
) -> tuple[Trainer, Display]:
    """Returns the trainer, and the callback that shows and records its progress."""
    rate = schedule_by_name(
        flags.schedule, flags.learning_rate, steps=flags.steps, warmup=flags.warmup
    )
    optimizer = OPTIMIZERS[flags.optimizer](
        rate, weight_decay=flags.weight_decay, clip_norm=flags.clip_norm
    )
    devices = jax.devices()
    meter = Meter(
        flops=_flops(source, flags.seq_len),
        peak=peak_flops([device.device_kind for device in devices]),
    )
    display = Display(console, meter)
    trackers = ("jsonl", *flags.track)
    trainer = Trainer(
        objective,
        optimizer,
        key=jax.random.key(flags.seed),
        mesh=flags.mesh,
        accumulation=flags.accumulation,
        checkpoints=Checkpoints(
            folder.checkpoints,
            every=flags.checkpoint_every,
            keep=Keep(last=flags.keep_checkpoints),
            verify=flags.verify_checkpoints == "on",
        ),
        tracker=join_trackers(*(tracker_by_name(t, folder.logs) for t in trackers)),
        run_config=flags.config(),
        callbacks=(display,),
    )
    return trainer, display


def _evaluations(
    flags: TrainingFlags, source: Pretrained, held_out: Documents | None
) -> dict[str, Evaluation]:
    if held_out is None:
        return {}
    options = _row_options(flags, source)
    return {
        HELD_OUT: Evaluation(
            batches=lambda: evaluation_batches(held_out, **options),
            metrics=token_metrics(),
        )
    }


def _figures(flags: TrainingFlags, display: Display) -> dict[str, Any]:
    """Returns the run's figures under the keys of `--json`."""
    evaluations = display.evaluations
    return {
        "steps": flags.steps,
        "tokens": display.tokens,
        "losses": display.losses,
        "terms": display.terms,
        "tokens_per_second": display.meter.tokens_per_second,
        "first_step_seconds": display.meter.first_step_seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "eval": {
            "before": _held_out_metrics(evaluations.get(0)),
            "after": _held_out_metrics(evaluations.get(flags.steps)),
        },
    }


def _held_out_metrics(metrics: Mapping[str, float] | None) -> dict[str, float] | None:
    """Returns metrics without the prefix of the held-out set."""
    if metrics is None:
        return None
    return {name.removeprefix(f"{HELD_OUT}/"): x for name, x in metrics.items()}


def _flops(source: Pretrained, seq_len: int) -> float | None:
    """Returns the FLOPs of one token; None where the model is not a native decoder."""
    if not isinstance(source.model, Decoder):
        return None
    c = source.model.config
    sizes = {path: leaf.size for path, leaf in flatten(source.variables).items()}
    # An untied input table is read, not multiplied.
    is_tied = c.head is not None and c.head.tied
    table = 0 if is_tied else sizes["params", "embed", "weight"]
    cost = flops_per_token(
        sum(sizes.values()) - table,
        layers=c.layers,
        attention_width=c.attention.heads * c.attention.head_dim,
        seq=seq_len,
    )
    return float(cost)
