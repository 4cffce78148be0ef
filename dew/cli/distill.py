"""`dew distill`: a student learns from a teacher, goes out, and is proved."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console

from dew import roads
from dew.cli.lora import trained_by
from dew.cli.models import load_to_train, tokenizer_of
from dew.cli.report import show
from dew.cli.terms import Chosen, chosen
from dew.cli.training import Training, table
from dew.converters.pretrained import Pretrained
from dew.data.teacher_cache import CachedBatches, TeacherCache, tokenizer_hash
from dew.nn.decoder import Decoder
from dew.objectives.distillation import Distillation
from dew.objectives.features import LayerPairs, even_layers
from dew.objectives.language import CausalLM
from dew.objectives.measures import perplexities
from dew.objectives.teachers import FromBatch, InStep, Teacher
from dew.objectives.vocabulary import VocabularyMap, align
from dew.typing import Batch

TeacherRoad = Literal["native", "lowered", "live", "cache"]


@dataclass(frozen=True, kw_only=True)
class Distill(Training):
    """Train a student to say what its teacher says, and write the student."""

    student: str
    """The model to train: a Hugging Face folder, hub id, or a run of ours."""
    teacher: str | None = None
    """The model to learn from; not with --teacher-road cache."""
    teacher_road: TeacherRoad = "lowered"
    """lowered and native run in the step, live in torch beside it, cache is on disk."""
    cache: Path | None = None
    """With --teacher-road cache: what dew cache-teacher wrote, text included."""
    data: tuple[str, ...] = ()
    """Text to train on: .txt, .jsonl or .parquet files, or folders of them."""
    terms: tuple[str, ...] = ("kl", "ce=0.5")
    """Losses and their weights: kl, reverse_kl, jsd, skew, tvd, soft_ce, sampled, uld,
    ce, hidden, cosine, relation."""
    temperature: float = 1.0
    """Of both sides, in every term that has one."""
    chunk: int | None = None
    """Positions whose logits are made at a time; by default as memory asks for it."""
    top_k: int = 64
    """With --teacher-road live: how many classes the teacher hands over."""

    def run(self) -> int:
        """Trains, exports, certifies and reports; the first process speaks for all."""
        console = Console(stderr=True, quiet=jax.process_index() > 0)
        self._check()
        student = load_to_train(
            self.student,
            dtype=self.dtype,
            road=self.road,
            remat=self.remat,
            stack=self.stack,
        )
        student = self.prepared(student)
        taught = self._taught(student, console)
        picked = self._terms(student, taught.source)
        objective = Distillation(
            student=CausalLM(
                source=student, seq_len=self.seq_len, trainable=trained_by(student)
            ),
            teacher=taught.teacher,
            terms=picked.terms,
            hidden=picked.hidden,
            relations=picked.relations,
            chunk="auto" if self.chunk is None else self.chunk,
        )
        result = self.train(
            objective,
            student,
            taught.data,
            sources=tuple(s for s in (student, taught.source) if s is not None),
            console=console,
        )
        result |= perplexities({k: v[-1] for k, v in result["terms"].items()})
        rows = table(result)
        rows += [
            (name, f"{values[0]:.4f} → {values[-1]:.4f}")
            for name, values in result["terms"].items()
        ]
        show(f"distilled into {student.address}", rows, result, self.json)
        return 0

    def _check(self) -> None:
        """Refuses flags that do not go together, all at once."""
        is_cached = self.teacher_road == "cache"
        faults = []
        if is_cached != (self.cache is not None):
            faults.append("--cache goes with --teacher-road cache, and that with it")
        if is_cached == (self.teacher is not None):
            faults.append("give --teacher, or --teacher-road cache in its place")
        if is_cached == bool(self.data):
            faults.append("give --data, or a cache, which brings its own text")
        if faults:
            raise ValueError("; ".join(faults))

    def _taught(self, student: Pretrained, console: Console) -> "_Taught":
        """The teacher as the objective takes it, and the data with it."""
        if self.cache is not None:
            return self._from_cache(self.cache, student)
        data = self.batches(student, console)
        if self.teacher_road == "live":
            live = roads.live_batches(
                self.teacher or "", data, top_k=self.top_k, temperature=self.temperature
            )
            taught = FromBatch(temperature=self.temperature)
            return _Taught(source=None, teacher=taught, data=live)
        with console.status("loading the teacher"):
            source = load_to_train(
                self.teacher or "", dtype=self.dtype, road=self.teacher_road_in_step
            )
        taught = InStep(
            objective=CausalLM(source=source, seq_len=self.seq_len),
            vocabulary=common_vocabulary(student, source),
        )
        return _Taught(source=source, teacher=taught, data=data)

    @property
    def teacher_road_in_step(self) -> roads.Road:
        """The teacher's way into JAX, where it takes one."""
        return "lowered" if self.teacher_road == "lowered" else "native"

    def _from_cache(self, folder: Path, student: Pretrained) -> "_Taught":
        cache = TeacherCache(folder)
        cache.require(
            tokenizer=tokenizer_hash(tokenizer_of(student)),
            seq_len=self.seq_len,
            temperature=self.temperature,
            vocab=num_rows(student),
        )
        data = CachedBatches(
            cache,
            batch_size=self.batch_size,
            seed=self.seed,
            shard=(jax.process_index(), jax.process_count()),
        )
        taught = FromBatch(
            policy=cache.binding.policy, temperature=cache.binding.temperature
        )
        return _Taught(source=None, teacher=taught, data=data)

    def _terms(self, student: Pretrained, teacher: Pretrained | None) -> Chosen:
        def pairs() -> LayerPairs:
            models = [None if s is None else s.model for s in (student, teacher)]
            counts = [m.config.layers for m in models if isinstance(m, Decoder)]
            if len(counts) < 2:
                raise ValueError(
                    "hidden states can be matched where student and teacher both take "
                    f"the native road; --teacher-road is {self.teacher_road}"
                )
            return even_layers(*counts)

        return chosen(self.terms, temperature=self.temperature, pairs=pairs)


@dataclass(frozen=True, kw_only=True)
class _Taught:
    source: Pretrained | None
    teacher: Teacher
    data: Iterator[Batch]


def num_rows(source: Pretrained) -> int:
    """How many rows a model's logits have."""
    config: Any = source.config
    return int(config["vocab_size"])


def common_vocabulary(student: Pretrained, teacher: Pretrained) -> VocabularyMap | None:
    """The classes that both sides score; None where rows mean the same on both.

    Raises:
        ValueError: the tokenizers cannot be proved to agree.
    """
    sides = [(tokenizer_of(one), num_rows(one)) for one in (student, teacher)]
    (ours, our_rows), (theirs, their_rows) = sides
    if our_rows == their_rows and tokenizer_hash(ours) == tokenizer_hash(theirs):
        return None
    return align(ours, theirs, student_rows=our_rows, teacher_rows=their_rows)
