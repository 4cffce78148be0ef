"""`dew distill`: a student learns from a teacher, goes out, and is proved."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import jax
from rich.console import Console

from dew import api as roads
from dew.cli.flags import TrainingFlags
from dew.cli.inputs import (
    local_folder,
    model_faults,
    not_positive,
    refuse,
    text_faults,
    too_small,
)
from dew.cli.load import (
    blocks_in,
    common_vocabulary,
    configured_blocks,
    load_to_train,
    num_blocks,
    num_rows,
    tokenizer_of,
    vocabulary_between,
    weights_hash,
)
from dew.cli.lora_flags import trained_by
from dew.cli.report import show
from dew.cli.teacher_time import Watch, seconds_a_token, waited
from dew.cli.terms import STATE_TERMS, TERMS, parse_terms, term_faults, term_names
from dew.cli.train import open_texts, prepare_model, text_batches, train
from dew.converters.folder.folder import Folder
from dew.converters.open_folder import open_folder
from dew.converters.pretrained import Pretrained
from dew.data import Batches
from dew.data.retokenize import Retokenized
from dew.data.teacher_cache import (
    Binding,
    CachedBatches,
    Manifest,
    TeacherCache,
    tokenizer_hash,
)
from dew.losses.hidden_states import LayerPairs, StateTerm, even_layers
from dew.losses.scores import DenseScores, OwnProbabilities, misfit
from dew.losses.sparse_scores import TopKScores
from dew.losses.term import Term
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.cross_tokenizer import CrossTokenizerTeacher
from dew.objectives.distillation.objective import Distillation
from dew.objectives.distillation.on_policy import OnPolicy
from dew.objectives.distillation.teachers import (
    FORMS,
    ModelTeacher,
    PrecomputedTeacher,
    Teacher,
)
from dew.training.logs import Log
from dew.typing import Batch

TeacherRoad = Literal["native", "lowered", "live", "cache"]


@dataclass(frozen=True, kw_only=True)
class Distill(TrainingFlags):
    """Train a student to match its teacher's predictions, and export the student."""

    student: str
    """Student model to train: a Hugging Face folder, a hub id or a run of dew."""
    teacher: str | None = None
    """Teacher model, likewise; omitted with --teacher-road cache."""
    teacher_road: TeacherRoad = "lowered"
    """How the teacher runs: lowered or native inside the training step, live in torch
    beside it, or cache from scores on disk."""
    cache: Path | None = None
    """Folder that dew cache-teacher wrote, for --teacher-road cache; holds the text."""
    data: tuple[str, ...] = ()
    """Text to train on: .txt, .jsonl or .parquet files, or folders of them."""
    terms: tuple[str, ...] = ("kl", "ce=0.5")
    """Loss terms and their weights: kl, reverse_kl, jsd, skew, tvd, soft_ce, sampled,
    uld, ce, student_loss, hidden, cosine, relation, attention; kl=0.5, or
    kl=linear:1.0->0.1@1000."""
    temperature: float = 1.0
    """Softmax temperature of teacher and student, in every term that has one."""
    chunk: int | None = None
    """Positions whose logits exist at a time; by default chosen by their size."""
    top_k: int = 64
    """Most likely classes per position that a live teacher passes on."""
    on_policy: float = 0.0
    """Share of rows sampled from the student; for teachers inside the step only."""
    on_policy_tokens: int | None = None
    """Number of tokens sampled in such a row; by default half of --seq-len."""
    time_teacher: bool = True
    """Time the teacher alone before the run, to log its share of the step time."""

    def run(self) -> int:
        """Trains, exports, certifies and prints the figures, on the first process."""
        console = Console(stderr=True, quiet=jax.process_index() > 0)
        given = open_texts(self, console)
        cache = None if self.cache is None else TeacherCache(self.cache)
        student = load_to_train(
            self.student,
            road=self.road,
            remat=self.remat,
            stack=self.stack,
            **self.loading,
        )
        student = prepare_model(self, student)
        source = self._teacher_source(console)
        terms = self._terms(student, source)
        if cache is not None:
            taught = self._from_cache(cache, student)
        else:
            data = text_batches(self, student, given.training, console)
            taught = self._taught(student, source, terms, data, console)
        lm = CausalLM(
            source=student, seq_len=self.seq_len, trainable=trained_by(student)
        )
        if student.config.get("output_router_logits"):
            console.print(
                "the router loss of the student (output_router_logits) has no part in "
                "distillation: the loss is that of --terms"
            )
        objective = Distillation(
            student=lm,
            teacher=taught.teacher,
            terms=terms,
            on_policy=self._on_policy,
            chunk="auto" if self.chunk is None else self.chunk,
        )
        watch = Watch(teacher_seconds=self._timed(taught, console))
        result = train(
            self,
            objective,
            student,
            taught.data,
            held_out=given.held_out,
            sources={"student": student}
            | ({} if source is None else {"teacher": source}),
            hashes=taught.hashes,
            derived=watch,
            console=console,
        )
        rows = result.rows()
        rows += [
            (name, f"{values[0]:.4f} → {values[-1]:.4f}")
            for name, values in result.figures["terms"].items()
        ]
        if "teacher_share" in watch.last:
            rows.append(
                ("teacher's share of the time", f"{watch.last['teacher_share']:.0%}")
            )
        report = result.json() | dict(watch.last)
        show(f"distilled into {student.address}", rows, report, self.json)
        return 0

    def check(self) -> None:
        """Raises one ValueError that names every fault of flags and files."""
        faults = self._flag_faults() + term_faults(self.terms) + self._term_misfits()
        faults += not_positive(self, "temperature") + self.faults()
        faults += too_small(self, 1, "chunk", "top_k", "on_policy_tokens")
        if self.data:
            faults += text_faults("--data", self.data)
        faults += model_faults(
            "--student",
            self.student,
            road=self.road,
            ignore_fields=self.ignore_fields,
            needs_tokenizer=True,
            needs_head=True,
            seq_len=self.seq_len,
        )
        if self.teacher is not None:
            faults += model_faults(
                "--teacher",
                self.teacher,
                road="auto" if self.teacher_road == "live" else self._road_in_step,
                ignore_fields=self.ignore_fields,
                needs_tokenizer=self.teacher_road != "live",
                needs_head=True,
                seq_len=self.seq_len,
            )
        refuse([*faults, *self._pair_faults()])

    def _flag_faults(self) -> list[str]:
        """Returns a message for flags that do not go together or are out of range."""
        is_cached = self.teacher_road == "cache"
        faults = []
        if is_cached != (self.cache is not None):
            faults.append("--cache goes with --teacher-road cache, and that with it")
        if is_cached == (self.teacher is not None):
            faults.append("give --teacher, or --teacher-road cache in its place")
        if is_cached == bool(self.data):
            faults.append("give --data, or a cache, which brings its own text")
        if self.on_policy and self.teacher_road in ("live", "cache"):
            faults.append(
                f"--on-policy needs a teacher in the step, not {self.teacher_road}"
            )
        if not 0 <= self.on_policy <= 1:
            faults.append(f"--on-policy must be from 0 to 1, got {self.on_policy:g}")
        if self.on_policy and (self.on_policy_tokens or 0) >= self.seq_len:
            faults.append(
                f"--on-policy-tokens must leave room for a prompt in {self.seq_len} "
                f"--seq-len, got {self.on_policy_tokens}"
            )
        if self.teacher_road == "live" and not roads.has_torch():
            faults.append(
                f"--teacher-road live needs torch and transformers: {roads.INSTALL}"
            )
        return faults

    def _term_misfits(self) -> list[str]:
        """Returns a message for each term that the teacher's road cannot serve."""
        names, road = term_names(self.terms), self.teacher_road
        scores = self._scores_type
        faults = [
            f"--terms {name} with --teacher-road {road}: "
            + misfit(term, term.needs_scores, scores)
            for name in sorted(names & set(TERMS))
            for term in [TERMS[name](1.0)]
            if term.needs_scores is not None
            and scores is not None
            and not issubclass(scores, term.needs_scores)
        ]
        states = sorted(names & set(STATE_TERMS))
        if road == "cache" and states:
            faults.append(
                f"--terms {', '.join(states)}: a cache keeps neither hidden states nor "
                "attention; use another --teacher-road"
            )
        elif "attention" in states and (road != "native" or self.road == "lowered"):
            faults.append(
                "--terms attention needs both models on the native road, which keeps "
                f"attention maps; give --teacher-road native, and no --road lowered, "
                f"got {road} and {self.road}"
            )
        if self.chunk is not None:
            whole = sorted(names & {"uld", "student_loss", "attention"})
            faults += [
                f"--terms {name} cannot be chunked: omit --chunk" for name in whole
            ]
        return faults

    @property
    def _scores_type(self) -> type | None:
        """The form of the teacher's scores; None where a cache does not tell."""
        if self.teacher_road != "cache":
            return TopKScores if self.teacher_road == "live" else DenseScores
        binding = self._binding
        return None if binding is None else FORMS[binding.policy]

    @cached_property
    def _binding(self) -> Binding | None:
        """What the manifest of --cache says; None where there is none to read."""
        try:
            return None if self.cache is None else Manifest.read(self.cache).binding
        except (ValueError, OSError):
            return None

    def _pair_faults(self) -> list[str]:
        """Returns what the student and its teacher's folder or cache tell of a misfit.

        Folders that are not on this machine tell nothing yet.
        """
        student = local_folder(self.student)
        if self.cache is not None:
            return self._cache_faults(self.cache, student)
        teacher = None if self.teacher is None else local_folder(self.teacher)
        if student is None or teacher is None:
            return []
        counts = blocks_in(student.config), blocks_in(teacher.config)
        if term_names(self.terms) & set(STATE_TERMS) and None not in counts:
            try:
                even_layers(counts[0] or 0, counts[1] or 0)
            except ValueError as fault:
                return [f"--terms over hidden states or attention: {fault}"]
        return self._vocabulary_faults(student, teacher)

    def _vocabulary_faults(self, student: Folder, teacher: Folder) -> list[str]:
        """Returns why a teacher in the step scores tokens that the student has not."""
        if self.teacher_road == "live" or self.pad_vocab != 1 or self._only_ranks:
            return []
        sides = [
            (side.tokenizer, side.config.get("vocab_size"))
            for side in (student, teacher)
        ]
        known = [
            (tokenizer, rows)
            for tokenizer, rows in sides
            if tokenizer is not None and isinstance(rows, int)
        ]
        if len(known) < 2:
            return []
        try:
            vocabulary_between(known[0], known[1])
        except ValueError as fault:
            return [f"--teacher and --student: {fault}"]
        return []

    @property
    def _only_ranks(self) -> bool:
        """Whether all terms over logits are the student's own or compare ranks."""
        made = [TERMS[n](1.0) for n in term_names(self.terms) & set(TERMS)]
        return all(
            term.student_only or term.needs_scores is OwnProbabilities for term in made
        )

    def _cache_faults(self, cache: Path, student: Folder | None) -> list[str]:
        try:
            manifest = Manifest.read(cache)
        except (ValueError, OSError) as fault:
            return [f"--cache {cache}: {fault}"]
        expected: dict[str, object] = {
            "seq_len": self.seq_len,
            "temperature": self.temperature,
        }
        if student is not None and student.tokenizer is not None:
            expected["tokenizer"] = tokenizer_hash(student.tokenizer)
        faults = [f"--cache {cache}: {f}" for f in manifest.binding.unlike(**expected)]
        if not manifest.is_complete:
            faults.append(
                f"--cache {cache} is not complete; run dew cache-teacher again and it "
                "goes on"
            )
        return faults

    @property
    def _on_policy(self) -> OnPolicy | None:
        if not self.on_policy:
            return None
        new_tokens = self.on_policy_tokens or self.seq_len // 2
        return OnPolicy(rate=self.on_policy, new_tokens=new_tokens)

    @cached_property
    def _teacher_folder(self) -> Folder:
        """The folder of a live teacher, opened once."""
        return open_folder(self.teacher or "")

    def _teacher_source(self, console: Console) -> Pretrained | None:
        """The teacher as a model of ours; None where it runs elsewhere."""
        if self.teacher is None or self.teacher_road == "live":
            return None
        with console.status("loading the teacher"):
            return load_to_train(self.teacher, road=self._road_in_step, **self.loading)

    def _taught(
        self,
        student: Pretrained,
        source: Pretrained | None,
        terms: tuple[Term, ...],
        data: Batches,
        console: Console,
    ) -> "_Taught":
        """The teacher as the objective takes it, and the data with it."""
        if source is None:
            return self._live(data, terms)
        objective = CausalLM(source=source, seq_len=self.seq_len)
        try:
            vocabulary = common_vocabulary(student, source)
        except ValueError:
            # SpanScores, the only ones across tokenizers, serve no other terms.
            if not self._only_ranks:
                raise
            console.print("the tokenizers differ: ULD over the spans both cut alike")
            respelled = Retokenized(
                data,
                student=tokenizer_of(student),
                teacher=tokenizer_of(source),
                seq_len=2 * self.seq_len,
            )
            across = CrossTokenizerTeacher(objective=objective)
            return _Taught(teacher=across, data=respelled)
        return _Taught(
            teacher=ModelTeacher(objective=objective, vocabulary=vocabulary), data=data
        )

    def _live(self, data: Batches, terms: tuple[Term, ...]) -> "_Taught":
        layers = {
            theirs
            for term in terms
            if isinstance(term, StateTerm) and term.reads == "hidden"
            for _, theirs in term.pairs
        }
        live = roads.live_batches(
            self._teacher_folder,
            data,
            top_k=self.top_k,
            temperature=self.temperature,
            layers=tuple(sorted(layers)),
        )
        return _Taught(
            teacher=live.teacher,
            data=live,
            hashes={"teacher": weights_hash(self._teacher_folder)},
            waited_s=lambda: live.waited_s,
        )

    def _timed(
        self, taught: "_Taught", console: Console
    ) -> Callable[[Log], float] | None:
        """How long the teacher took in the interval of a log, where that is known."""
        if taught.waited_s is not None:
            return waited(taught.waited_s)
        is_alone = jax.process_count() == 1 and len(jax.devices()) == 1
        if not (self.time_teacher and is_alone and taught.teacher.scores_any_tokens):
            return None
        with console.status("timing the teacher"):
            seconds = seconds_a_token(
                taught.teacher, rows=self.batch_size, seq_len=self.seq_len
            )
        return lambda log: seconds * log.tokens

    @property
    def _road_in_step(self) -> roads.Road:
        """The teacher's way into JAX, where it takes one."""
        return "lowered" if self.teacher_road == "lowered" else "native"

    def _from_cache(self, cache: TeacherCache, student: Pretrained) -> "_Taught":
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
        taught = PrecomputedTeacher(
            policy=cache.binding.policy, temperature=cache.binding.temperature
        )
        return _Taught(teacher=taught, data=data)

    def _terms(
        self, student: Pretrained, teacher: Pretrained | None
    ) -> tuple[Term, ...]:
        def pairs() -> LayerPairs:
            if teacher is not None:
                return even_layers(num_blocks(student), num_blocks(teacher))
            if self.teacher_road == "live":
                theirs = configured_blocks(self._teacher_folder)
                return even_layers(num_blocks(student), theirs)
            raise ValueError("a cache keeps no hidden states; use another road")

        return parse_terms(
            self.terms,
            temperature=self.temperature,
            pairs=pairs,
            accumulation=self.accumulation,
        )


@dataclass(frozen=True, kw_only=True)
class _Taught:
    teacher: Teacher
    data: Iterator[Batch]
    hashes: Mapping[str, str] = field(default_factory=dict)
    waited_s: Callable[[], float] | None = None
