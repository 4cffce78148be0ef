"""`dew cache-teacher`: what a teacher says of a text, once, for many students."""

import json as json_format
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import multihost_utils
from rich.console import Console

from dew.api import Road
from dew.cli.inputs import (
    model_faults,
    not_positive,
    refuse,
    text_faults,
    too_small,
)
from dew.cli.load import (
    Bos,
    Precision,
    announce_ends,
    bos_of,
    eos_of,
    load_to_train,
    num_rows,
    texts,
    tokenizer_of,
)
from dew.cli.report import show
from dew.converters.open_folder import open_folder
from dew.converters.pretrained import Pretrained
from dew.data import Batches, evaluation_batches
from dew.data.distillkit import Compression, captured_texts, packed_rows
from dew.data.teacher_cache import (
    Binding,
    CacheWriter,
    Manifest,
    Policy,
    tokenizer_hash,
)
from dew.objectives.distillation.teachers import scores_of
from dew.objectives.tokens import INPUTS
from dew.processes import exchange_messages, process_phase

OPENING, SCORING, CLOSING = (
    "opening the cache",
    "scoring with the teacher",
    "closing the cache",
)
"""Phases that several processes of `dew cache-teacher` go through together."""


@dataclass(frozen=True, kw_only=True)
class CacheTeacher:
    """Score packed text with a teacher and store its most likely tokens on disk.

    Run again after an interruption, it continues from the last complete file. Several
    processes score a batch each in turn, and the first writes the cache that one
    process would.
    """

    teacher: str
    """Teacher model: a Hugging Face folder, a hub id or a run of dew; with --captured,
    any model that has the teacher's tokenizer."""
    out: Path
    """Folder of the cache that is written."""
    data: tuple[str, ...] = ()
    """Text to score: .txt, .jsonl or .parquet files, or folders of them."""
    captured: tuple[Path, ...] = ()
    """DistillKit's parquet files to convert to a cache, in place of --data."""
    compression: Path | None = None
    """compression_config.yaml of the --captured files, if they are compressed."""
    top_k: int = 16
    """Number of tokens stored at every position, at most all, or drawn there."""
    policy: Policy = "top_k"
    """Tokens to store: top_k is the most likely ones with the mass of all others,
    sampled is draws from the teacher's distribution."""
    temperature: float = 1.0
    """Softmax temperature of the stored probabilities; students train at it too."""
    precision: Literal["float16", "float32"] = "float16"
    """Precision of the stored log-probabilities."""
    seq_len: int = 1024
    """Number of tokens of a packed row."""
    batch_size: int = 4
    """Number of rows scored in one forward pass."""
    shard_rows: int = 1024
    """Number of rows stored in one file."""
    seed: int = 0
    """Random seed for sampling, with --policy sampled."""
    dtype: Precision = "float32"
    """Precision of the teacher's forward pass."""
    road: Road = "auto"
    """How the teacher is loaded into JAX; auto is native where it can, else lowered."""
    ignore_fields: tuple[str, ...] = ()
    """Fields of config.json to ignore although transformers reads them."""
    packing: Literal["wrapped", "best_fit"] = "wrapped"
    """Packing of documents into rows: wrapped pads nothing, best_fit splits no document
    that fits into a row."""
    bos: Bos = "auto"
    """Beginning-of-text tokens before every document: auto as the tokenizer's template
    has them, always, or never."""
    text_field: str = "text"
    """Name of the text field in .jsonl and .parquet records."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of a table."""

    def check(self) -> None:
        """Raises one ValueError that names every fault of flags and files."""
        faults = model_faults(
            "--teacher",
            self.teacher,
            road=self.road,
            ignore_fields=self.ignore_fields,
            needs_tokenizer=True,
            needs_weights=not self.captured,
            needs_head=not self.captured,
            seq_len=None if self.captured else self.seq_len,
        )
        if bool(self.data) == bool(self.captured):
            faults.append("give --data or --captured, and not both")
        if self.data:
            faults += text_faults("--data", self.data)
        faults += [
            f"--captured: {file} does not exist"
            for file in self.captured
            if not file.is_file()
        ]
        if self.compression is not None:
            try:
                Compression.read(self.compression)
            except (ValueError, TypeError, OSError) as fault:
                faults.append(f"--compression: {fault}")
        faults += too_small(self, 1, "top_k", "batch_size", "shard_rows")
        faults += too_small(self, 2, "seq_len") + too_small(self, 0, "seed")
        refuse([*faults, *not_positive(self, "temperature"), *self._out_faults()])

    def _out_faults(self) -> list[str]:
        """Returns why the cache cannot be written, or continued with these flags."""
        if not self.out.exists() or not any(self.out.iterdir()):
            return []
        try:
            binding = Manifest.read(self.out).binding
        except (ValueError, OSError) as fault:
            return [f"--out: {fault}"]
        if self.captured:
            return []
        given = {
            "seq_len": self.seq_len,
            "k": self._kept(binding.vocab),
            "temperature": self.temperature,
            "policy": self.policy,
            "precision": self.precision,
        }
        return [
            f"--out: {self.out} is a cache of something else: {name} was "
            f"{getattr(binding, name)!r} and is {value!r}"
            for name, value in given.items()
            if getattr(binding, name) != value
        ]

    def _kept(self, vocab: int) -> int:
        """Returns how many tokens are stored: all classes where there are fewer."""
        return min(self.top_k, vocab) if self.policy == "top_k" else self.top_k

    def run(self) -> int:
        """Scores the text with the teacher, writes the cache and prints its figures."""
        console = Console(stderr=True, quiet=jax.process_index() > 0)
        if self.captured:
            with process_phase("converting captured scores"):
                if jax.process_index() == 0:
                    self._report(self._from_captured(), "captured scores")
            return 0
        documents = texts(self.data, field=self.text_field, console=console)
        source = load_to_train(
            self.teacher,
            dtype=self.dtype,
            road=self.road,
            ignore_fields=self.ignore_fields,
        )
        announce_ends(source, self.bos, console)
        data = evaluation_batches(
            documents,
            tokenizer=tokenizer_of(source),
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            packing=self.packing,
            bos_id=bos_of(source, self.bos),
            eos_id=eos_of(source),
        )
        with console.status("scoring with the teacher"):
            manifest = self._write(source, data)
        if manifest is not None:
            self._report(manifest, source.address)
        return 0

    def _report(self, manifest: Manifest, address: str) -> None:
        size = sum(file.stat().st_size for file in self.out.glob("*.bin"))
        result = {
            "bytes_per_token": size / max(manifest.tokens, 1),
            "tokens": manifest.tokens,
            "manifest": asdict(manifest),
        }
        rows = [
            ("tokens", f"{manifest.tokens:,}"),
            ("bytes per token", f"{result['bytes_per_token']:.1f}"),
            ("rows", f"{sum(shard.rows for shard in manifest.shards):,}"),
            ("files", f"{len(manifest.shards)}"),
        ]
        show(f"{address} → {self.out}", rows, result, self.json)

    def _from_captured(self) -> Manifest:
        """Turns files of another project into a cache; a stopped one goes on."""
        how = None if self.compression is None else Compression.read(self.compression)
        folder = open_folder(self.teacher)
        if folder.tokenizer is None:
            raise ValueError(f"{self.teacher} has no tokenizer.json")
        texts = captured_texts(self.captured, how)
        first = next(texts, None)
        if first is None:
            raise ValueError(
                f"there is no text in {', '.join(map(str, self.captured))}"
            )
        digests = [sha256(file.read_bytes()).hexdigest() for file in self.captured]
        binding = Binding(
            teacher=sha256("".join(digests).encode()).hexdigest(),
            tokenizer=tokenizer_hash(folder.tokenizer),
            order={"captured": digests},
            seq_len=self.seq_len,
            vocab=int(folder.config["vocab_size"]),
            k=first.ids.shape[1],
            temperature=self.temperature,
            precision=self.precision,
        )
        writer = CacheWriter(
            folder=self.out, binding=binding, shard_rows=self.shard_rows
        )
        if writer.manifest.is_complete:
            return writer.manifest
        rows = packed_rows(chain([first], texts), self.seq_len)
        done = sum(shard.rows for shard in writer.manifest.shards)
        for row in islice(rows, done, None):
            done += 1
            writer.add(row, {"row": done})
        return writer.close({"row": done})

    def _binding(self, source: Pretrained, data: Batches) -> Binding:
        return Binding(
            teacher=source.content_hash,
            tokenizer=tokenizer_hash(tokenizer_of(source)),
            order=data.get_state()["stream"],
            seq_len=self.seq_len,
            vocab=num_rows(source),
            k=self._kept(num_rows(source)),
            temperature=self.temperature,
            policy=self.policy,
            precision=self.precision,
        )

    def _write(self, source: Pretrained, data: Batches) -> Manifest | None:
        """Scores and writes all rows; returns the manifest, in the first process.

        Each process scores every n-th batch, whole: in batches of another shape the
        last bits of a score would differ from those of one process.
        """
        count, index = jax.process_count(), jax.process_index()
        writer: CacheWriter | None = None
        # All read on from the same place, which the first process finds in its folder.
        found: dict[str, Any] = {}
        with process_phase(OPENING):
            if index == 0:
                writer = CacheWriter(
                    folder=self.out,
                    binding=self._binding(source, data),
                    shard_rows=self.shard_rows,
                )
                found = {
                    "is_complete": writer.manifest.is_complete,
                    "position": writer.position,
                }
        message = json_format.dumps(found) if index == 0 else ""
        found = json_format.loads(exchange_messages(OPENING, message)[0])
        if not found["is_complete"]:
            if found["position"] is not None:
                data.set_state(found["position"])
            for batch, stored, position in self._scored(source, data, index, count):
                if writer is not None:
                    writer.add({**batch, **stored}, position)
        with process_phase(CLOSING):
            if writer is None or writer.manifest.is_complete:
                return None if writer is None else writer.manifest
            return writer.close(data.get_state())

    def _scored(
        self, source: Pretrained, data: Batches, index: int, count: int
    ) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Any]]]:
        """Yields each batch, its scores, and the data's position after it."""
        score = self._scorer(source)
        while True:
            turn: list[tuple[Mapping[str, Any], int, dict[str, Any]]] = []
            with process_phase(SCORING):
                for batch in islice(data, count):
                    turn.append((batch, data.trace.tokens, data.get_state()))
                if not turn:
                    return
                # In the last turn some have no batch, and repeat the last one.
                batch, tokens, _ = turn[min(index, len(turn) - 1)]
                # By the rows before it, so that a resumed draw is the same draw.
                drawn = jax.random.fold_in(jax.random.key(self.seed), tokens % 2**31)
                arrays = {name: jnp.asarray(x) for name, x in batch.items()}
                stored = jax.device_get(score(source.variables, arrays, drawn))
            if count > 1:
                stored = multihost_utils.process_allgather(stored)
            for place, (batch, _, position) in enumerate(turn):
                mine = {n: x[place] for n, x in stored.items()} if count > 1 else stored
                yield batch, mine, position

    def _scorer(self, source: Pretrained) -> Callable[..., Mapping[str, np.ndarray]]:
        def score(variables: Any, batch: Any, key: Any) -> Any:
            inputs = {name: batch[name] for name in INPUTS if name in batch}
            return scores_of(
                source.model.apply(variables, inputs).logits,
                policy=self.policy,
                k=self.top_k,
                key=key,
                temperature=self.temperature,
            )

        return jax.jit(score)
