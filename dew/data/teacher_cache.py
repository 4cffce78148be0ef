"""A teacher's scores of packed rows, small on disk and with random access.

A cache is a folder of shards beside a `manifest.json`. A shard is rows of one fixed
size: tokens, segment numbers and, for every token, the teacher's top k (ids,
log-probabilities, the log of the mass left over) or the tokens drawn from it with their
weights. The manifest names the teacher, tokenizer, text, packing, k, temperature and
policy of the rows; a run that expects others is refused.

Reading needs neither torch nor the teacher.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import grain
import numpy as np
from tokenizers import Tokenizer

from dew.typing import Position

MANIFEST = "manifest.json"
VERSION = 1

Policy = Literal["top_k", "sampled"]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The origin of a cache's rows; equal for two caches exactly if their rows are.

    `teacher` is the content hash of its weights, `tokenizer` that of its tokenizer,
    `order` the identity of the data stream that made the rows.
    """

    teacher: str
    tokenizer: str
    order: Mapping[str, Any]
    seq_len: int
    vocab: int
    k: int
    temperature: float = 1.0
    policy: Policy = "top_k"
    precision: Literal["float16", "float32"] = "float16"

    def __post_init__(self) -> None:
        faults = []
        if not 1 <= self.k <= self.vocab and self.policy == "top_k":
            faults.append(f"k must be from 1 to the {self.vocab} classes, got {self.k}")
        if not self.temperature > 0:
            faults.append(f"temperature must be > 0, got {self.temperature}")
        if faults:
            raise ValueError("teacher cache: " + "; ".join(faults))

    @property
    def row(self) -> np.dtype:
        """The structured dtype of a row in a shard, little-endian."""
        ids = "<u2" if self.vocab <= 2**16 else "<u4"
        real = "<f2" if self.precision == "float16" else "<f4"
        length, slots = (self.seq_len,), (self.seq_len, self.k)
        scores: list[tuple[str, str, tuple[int, ...]]] = [("ids", ids, slots)]
        if self.policy == "top_k":
            scores += [("log_probs", real, slots), ("tail", real, length)]
        else:
            scores.append(("weights", real, slots))
        tokens = [("tokens", ids, length), ("segments", "<u2", length)]
        return np.dtype([*tokens, *scores])

    @property
    def bytes_per_token(self) -> float:
        """The bytes of a row divided by its tokens."""
        return self.row.itemsize / self.seq_len

    def differences(self, other: "Binding") -> list[str]:
        """Lists the fields in which `other` differs, with both values."""
        others = json.loads(json.dumps(asdict(other)))
        return [
            f"{name} was {mine!r} and is {others[name]!r}"
            for name, mine in json.loads(json.dumps(asdict(self))).items()
            if mine != others[name]
        ]

    def unlike(self, **expected: object) -> list[str]:
        """Lists the fields whose values are not the expected ones, with both values."""
        fields = asdict(self)
        return [
            f"{name} must be {value!r}, it has {fields[name]!r}"
            for name, value in expected.items()
            if fields[name] != value
        ]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of rows, with its count and checksum."""

    name: str
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a cache folder, and the state of its writing.

    `position` is the data's position after the last shard; `is_complete` is true once
    no shard is to follow.
    """

    binding: Binding
    shards: tuple[Shard, ...] = ()
    tokens: int = 0
    position: Position | None = None
    is_complete: bool = False
    version: int = VERSION

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads the manifest of a cache folder.

        Raises:
            ValueError: there is none, or it is damaged or of another version.
        """
        file = folder / MANIFEST
        if not file.exists():
            raise ValueError(f"{folder} is not a teacher cache: it has no {MANIFEST}")
        raw = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"{file} is no manifest of a teacher cache; write it anew")
        if raw.get("version") != VERSION:
            raise ValueError(
                f"{folder} is a teacher cache of version {raw.get('version')}, this "
                f"package reads {VERSION}; write it anew"
            )
        try:
            shards = tuple(Shard(**shard) for shard in raw.pop("shards"))
            return cls(binding=Binding(**raw.pop("binding")), shards=shards, **raw)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is no manifest of a teacher cache: {error}; write it anew"
            ) from error

    def write(self, folder: Path) -> None:
        """Replaces the manifest of a folder atomically."""
        partial = folder / f"{MANIFEST}.partial"
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(folder / MANIFEST)


@dataclass(kw_only=True)
class CacheWriter:
    """Writes rows to a folder, shard by shard, and continues an incomplete cache.

    Rows that had not filled a shard when writing stopped are scored again: the data
    must continue at `position`, None for its start.
    """

    folder: Path
    binding: Binding
    shard_rows: int = 1024
    manifest: Manifest = field(init=False)
    _rows: list[np.ndarray] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / MANIFEST).exists():
            self.manifest = Manifest.read(self.folder)
            faults = self.manifest.binding.differences(self.binding)
            if faults:
                raise ValueError(
                    f"{self.folder} is a cache of something else: " + "; ".join(faults)
                )
        elif any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is in use and holds no teacher cache")
        else:
            self.manifest = Manifest(binding=self.binding)
            self.manifest.write(self.folder)

    @property
    def position(self) -> Position | None:
        """The data's position after the last written shard."""
        return self.manifest.position

    def add(self, batch: Mapping[str, np.ndarray], position: Position) -> None:
        """Adds a batch of rows with scores; `position` is the data's position after it.

        Rows of padding only are left out.
        """
        real = np.asarray(batch["segment_ids"]).any(axis=1)
        rows = np.zeros(int(real.sum()), self.binding.row)
        places = {"segments": "segment_ids", "tokens": "tokens"}
        for name in self.binding.row.names or ():
            source = places.get(name, f"teacher_{name}")
            rows[name] = np.asarray(batch[source])[real]
        self._rows.append(rows)
        if sum(map(len, self._rows)) >= self.shard_rows:
            self._flush(position, is_complete=False)

    def close(self, position: Position) -> Manifest:
        """Writes the remaining rows and marks the cache as complete."""
        self._flush(position, is_complete=True)
        return self.manifest

    def _flush(self, position: Position, *, is_complete: bool) -> None:
        shards, tokens = self.manifest.shards, self.manifest.tokens
        rows = np.concatenate([np.zeros(0, self.binding.row), *self._rows])
        self._rows = []
        if len(rows):
            name = f"rows-{len(shards):05d}.bin"
            partial = self.folder / f"{name}.partial"
            partial.write_bytes(rows.tobytes())
            partial.replace(self.folder / name)
            digest = sha256(rows.tobytes()).hexdigest()
            shards = (*shards, Shard(name=name, rows=len(rows), sha256=digest))
            tokens += int((rows["segments"] > 0).sum())
        self.manifest = Manifest(
            binding=self.binding,
            shards=shards,
            tokens=tokens,
            position=dict(position),
            is_complete=is_complete,
        )
        self.manifest.write(self.folder)


class TeacherCache(grain.sources.RandomAccessDataSource):
    """The rows of a complete cache, each as the arrays of a batch's row.

    Files are mapped, not read. Checksums are compared when the cache is opened, unless
    `verify` is false.
    """

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        faults = list(self._faults(verify))
        if faults:
            raise ValueError(f"the teacher cache {self.folder}: " + "; ".join(faults))
        row = self.binding.row
        self._maps = [
            np.memmap(self.folder / shard.name, row, "r", shape=(shard.rows,))
            for shard in self.manifest.shards
        ]
        self._ends = np.cumsum([shard.rows for shard in self.manifest.shards])

    @property
    def binding(self) -> Binding:
        """The origin of the rows: teacher, tokenizer, text and policy."""
        return self.manifest.binding

    def require(self, **expected: object) -> None:
        """Raises where fields of the binding differ from what a run expects.

        Raises:
            ValueError: it differs; all differences are named.
        """
        faults = self.binding.unlike(**expected)
        if faults:
            raise ValueError(
                f"the teacher cache {self.folder} is not of this run: "
                + "; ".join(faults)
                + "; write another with dew cache-teacher"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]:
        at = int(index)
        if not 0 <= at < len(self):
            raise IndexError(f"row {at} of {len(self)}")
        place = int(np.searchsorted(self._ends, at, side="right"))
        rows = self._maps[place]
        row = rows[at - int(self._ends[place]) + len(rows)]
        segments = row["segments"].astype(np.int32)
        arrays = {
            "tokens": row["tokens"].astype(np.int32),
            "segment_ids": segments,
            "positions": _positions(segments),
            "teacher_ids": row["ids"].astype(np.int32),
        }
        for name in ("log_probs", "tail", "weights"):
            if name in (self.binding.row.names or ()):
                arrays[f"teacher_{name}"] = np.array(row[name])
        return arrays

    def _faults(self, verify: bool) -> Iterator[str]:
        if not self.manifest.is_complete:
            yield "is not complete; run dew cache-teacher again and it goes on"
        if not self.manifest.shards:
            yield "holds no rows"
        for shard in self.manifest.shards:
            file = self.folder / shard.name
            size = shard.rows * self.binding.row.itemsize
            if not file.exists():
                yield f"{shard.name} is missing"
            elif file.stat().st_size != size:
                yield f"{shard.name} has {file.stat().st_size} bytes, not {size}"
            elif verify and _digest(file) != shard.sha256:
                yield f"{shard.name} is damaged: its sha256 is another"


class CachedBatches(Iterator[dict[str, np.ndarray]]):
    """Batches of a cache's rows, shuffled anew each epoch, without end.

    A position is that of grain's iterator and is valid for this cache only.
    """

    def __init__(
        self,
        cache: TeacherCache,
        *,
        batch_size: int,
        seed: int,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        index, count = shard
        if batch_size < 1 or batch_size % count:
            raise ValueError(
                f"batch_size must be a positive multiple of the {count} processes, got "
                f"{batch_size}"
            )
        share = batch_size // count
        rows = grain.MapDataset.source(cache).shuffle(seed).repeat()
        mine = slice(index * share, (index + 1) * share)
        dataset = rows.batch(batch_size).map(
            lambda batch: {name: array[mine] for name, array in batch.items()}
        )
        self._iterator = iter(dataset.to_iter_dataset())
        shards = [one.sha256 for one in cache.manifest.shards]
        digest = sha256(json.dumps(shards).encode()).hexdigest()
        self._identity = {"cache": digest, "seed": seed, "batch_size": batch_size}

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._iterator)

    def get_state(self) -> dict[str, object]:
        """Returns the position after the last batch, as JSON values."""
        return {"stream": self._identity, "position": self._iterator.get_state()}

    def set_state(self, state: Position) -> None:
        """Moves to a position that `get_state` returned.

        Raises:
            ValueError: it is of another cache, seed or batch size.
        """
        if state["stream"] != self._identity:
            raise ValueError(
                f"the saved position is of {state['stream']}, this data is "
                f"{self._identity}; resume with what the run was started with"
            )
        self._iterator.set_state(dict(state["position"]))


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Returns the sha256 of a tokenizer's complete JSON form."""
    return sha256(tokenizer.to_str().encode()).hexdigest()


def _positions(segments: np.ndarray) -> np.ndarray:
    """Counts positions from 0 in every segment; 0 in padding."""
    place = np.arange(len(segments), dtype=np.int32)
    is_start = np.diff(segments, prepend=-1) != 0
    starts = np.maximum.accumulate(np.where(is_start, place, 0))
    return np.where(segments > 0, place - starts, 0).astype(np.int32)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()
