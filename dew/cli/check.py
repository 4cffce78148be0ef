"""`dew check`: identities that a distillation loss must satisfy, as numbers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import tyro
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
    common_vocabulary,
    eos_of,
    load_to_train,
    num_blocks,
    texts,
    tokenizer_of,
)
from dew.cli.report import show
from dew.cli.terms import parse_terms, term_faults
from dew.converters.pretrained import Pretrained
from dew.data import evaluation_batches
from dew.data.documents import Documents
from dew.losses.hidden_states import even_layers
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.check import Row, check_distillation


@dataclass(frozen=True, kw_only=True)
class Check:
    """Check distillation between two models on text of your own."""

    teacher: str
    """Teacher model: a Hugging Face folder, a hub id or a run of dew."""
    student: str
    """Student model: a Hugging Face folder, a hub id or a run of dew."""
    data: tuple[str, ...]
    """Text to check on: .txt, .jsonl or .parquet files, or folders of them."""
    terms: tuple[str, ...] = ("kl", "ce=0.5")
    """Loss terms and their weights, in the form that dew distill takes."""
    temperature: float = 2.0
    """Softmax temperature of teacher and student."""
    rows: int = 2
    """Number of texts in the batch that is checked."""
    seq_len: int = 32
    """Number of tokens of each text."""
    road: Road = "auto"
    """How the student is loaded into JAX; auto is native where it can, else lowered."""
    teacher_road: Road = "auto"
    """How the teacher is loaded into JAX; auto is native where it can, else lowered."""
    ignore_fields: tuple[str, ...] = ()
    """Fields of config.json to ignore although transformers reads them."""
    text_field: str = "text"
    """Name of the text field in .jsonl and .parquet records."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of a table."""

    def check(self) -> None:
        """Raises one ValueError that names every fault of flags and files."""
        faults = term_faults(self.terms)
        faults += model_faults(
            "--teacher",
            self.teacher,
            road=self.teacher_road,
            ignore_fields=self.ignore_fields,
            needs_tokenizer=True,
            needs_head=True,
            seq_len=self.seq_len,
        )
        faults += model_faults(
            "--student",
            self.student,
            road=self.road,
            ignore_fields=self.ignore_fields,
            needs_tokenizer=True,
            needs_head=True,
            seq_len=self.seq_len,
        )
        faults += text_faults("--data", self.data) + not_positive(self, "temperature")
        refuse([*faults, *too_small(self, 1, "rows"), *too_small(self, 2, "seq_len")])

    def run(self) -> int:
        """Prints a row for each check; returns 1 if any did not pass, else 0."""
        console = Console(stderr=True)
        documents = texts(self.data, field=self.text_field, console=console)
        # Scanned: a dozen programs are compiled for few rows of short texts.
        student = load_to_train(
            self.student,
            dtype="float32",
            road=self.road,
            stack="scanned",
            ignore_fields=self.ignore_fields,
        )
        teacher = load_to_train(
            self.teacher,
            dtype="float32",
            road=self.teacher_road,
            stack="scanned",
            ignore_fields=self.ignore_fields,
        )
        with console.status("checking"):
            found = self._rows(student, teacher, documents)
        table = [
            (
                row.name if row.passed else f"FAILED: {row.name}",
                f"{row.found} (expected {row.expected})",
            )
            for row in found
        ]
        result = {"rows": [asdict(row) for row in found]}
        show(f"{self.teacher} → {self.student}", table, result, self.json)
        failed = [row for row in found if not row.passed]
        for row in failed:
            console.print(
                f"{row.name}: expected {row.expected}, found {row.found}", markup=False
            )
        return 1 if failed else 0

    def _rows(
        self, student: Pretrained, teacher: Pretrained, documents: Documents
    ) -> list[Row]:
        try:
            vocabulary = common_vocabulary(student, teacher)
        except ValueError as unproved:
            return [
                Row(
                    name="the vocabularies are aligned",
                    expected="proved",
                    found=str(unproved),
                    passed=False,
                )
            ]
        terms = parse_terms(
            self.terms,
            temperature=self.temperature,
            pairs=lambda: even_layers(num_blocks(student), num_blocks(teacher)),
        )
        sides = [CausalLM(source=s, seq_len=self.seq_len) for s in (student, teacher)]
        return check_distillation(
            sides[0],
            sides[1],
            self._batch(student, documents),
            terms=terms,
            vocabulary=vocabulary,
        )

    def _batch(self, student: Pretrained, documents: Documents) -> Mapping[str, Any]:
        """The first rows of the text, without segments: one text a row."""
        batch = next(
            evaluation_batches(
                documents,
                tokenizer=tokenizer_of(student),
                seq_len=self.seq_len,
                batch_size=self.rows,
                eos_id=eos_of(student),
            )
        )
        return {"tokens": batch["tokens"], "mask": batch["segment_ids"] > 0}
