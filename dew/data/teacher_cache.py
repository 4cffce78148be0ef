"""What a teacher said of packed rows, small on disk and read at random.

A cache is a folder of shards beside a `manifest.json`. A shard is rows of one fixed
size: tokens, segment numbers and, for every token, the teacher's top k (ids,
log-probabilities, the log of the mass left over) or the tokens drawn from it with their
weights. The manifest says which teacher, tokenizer, text, packing, k, temperature and
policy the rows belong to: whatever is read must match.

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

MANIFEST = "manifest.json"
VERSION = 1

Policy = Literal["top_k", "sampled"]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """What a cache belongs to; equal for two caches exactly if their rows are.

    `teacher` is the content hash of its weights, `tokenizer` that of its tokenizer,
    `order` how the text became rows, as the data stream identifies itself.
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
        """How one row lies in a shard, little-endian."""
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
        """Of a row, divided by its length."""
        return self.row.itemsize / self.seq_len

    def differences(self, other: "Binding") -> list[str]:
        """Says in what the other differs."""
        theirs = json.loads(json.dumps(asdict(other)))
        return [
            f"{name} was {mine!r} and is {theirs[name]!r}"
            for name, mine in json.loads(json.dumps(asdict(self))).items()
            if mine != theirs[name]
        ]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of rows."""

    name: str
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder holds, and where its writing stands.

    `position` is where the data went on after the last shard; `is_complete` says that
    nothing is to follow.
    """

    binding: Binding
    shards: tuple[Shard, ...] = ()
    tokens: int = 0
    position: Mapping[str, Any] | None = None
    is_complete: bool = False
    version: int = VERSION

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads a folder's manifest.

        Raises:
            ValueError: there is none, or it is of another version.
        """
        file = folder / MANIFEST
        if not file.exists():
            raise ValueError(f"{folder} is no teacher cache: it has no {MANIFEST}")
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw.get("version") != VERSION:
            raise ValueError(
                f"{folder} is a teacher cache of version {raw.get('version')}, this "
                f"package reads {VERSION}; write it anew"
            )
        shards = tuple(Shard(**shard) for shard in raw.pop("shards"))
        return cls(binding=Binding(**raw.pop("binding")), shards=shards, **raw)

    def write(self, folder: Path) -> None:
        """Replaces a folder's manifest in one move."""
        partial = folder / f"{MANIFEST}.partial"
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(folder / MANIFEST)


@dataclass(kw_only=True)
class CacheWriter:
    """Adds rows to a folder, shard by shard; a stopped one goes on where it stood.

    Rows that had not filled a shard when writing stopped are scored again: `position`
    is where the data must go on, None at its start.
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
    def position(self) -> Mapping[str, Any] | None:
        """Where the data goes on."""
        return self.manifest.position

    def add(self, batch: Mapping[str, np.ndarray], position: Mapping[str, Any]) -> None:
        """Takes rows with their scores; `position` is the data's after them.

        Rows of nothing but padding are left out.
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

    def close(self, position: Mapping[str, Any]) -> Manifest:
        """Writes what is left, and says that the cache is complete."""
        self._flush(position, is_complete=True)
        return self.manifest

    def _flush(self, position: Mapping[str, Any], *, is_complete: bool) -> None:
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
    """The rows of a complete cache, each as the arrays that a batch holds.

    Files are mapped, not read. Checksums are compared when it is opened, unless
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
        """What the rows belong to."""
        return self.manifest.binding

    def require(self, **expected: Any) -> None:
        """Refuses a cache whose binding is another than a run expects.

        Raises:
            ValueError: it differs; all differences are named.
        """
        mine = asdict(self.binding)
        faults = [
            f"{name} must be {value!r}, it has {mine[name]!r}"
            for name, value in expected.items()
            if mine[name] != value
        ]
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
        found = {
            "tokens": row["tokens"].astype(np.int32),
            "segment_ids": segments,
            "positions": _positions(segments),
            "teacher_ids": row["ids"].astype(np.int32),
        }
        for name in ("log_probs", "tail", "weights"):
            if name in (self.binding.row.names or ()):
                found[f"teacher_{name}"] = np.array(row[name])
        return found

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
    """Batches of a cache's rows, in another order each epoch, without end.

    Its position is that of grain's iterator, and belongs to this cache alone.
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

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch, as JSON can hold it."""
        return {"stream": self._identity, "position": self._iterator.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position.

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
    """sha256 of all that a tokenizer is."""
    return sha256(tokenizer.to_str().encode()).hexdigest()


def _positions(segments: np.ndarray) -> np.ndarray:
    """Places counted from 0 in every segment, 0 in padding."""
    place = np.arange(len(segments), dtype=np.int32)
    is_start = np.diff(segments, prepend=-1) != 0
    starts = np.maximum.accumulate(np.where(is_start, place, 0))
    return np.where(segments > 0, place - starts, 0).astype(np.int32)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()
