"""`dew eval`: perplexity of a causal language model on text."""

import math
from dataclasses import dataclass
from typing import Annotated

import jax
import tyro
from jax.sharding import Mesh
from rich.console import Console

from dew.api import Road
from dew.cli.inputs import model_faults, refuse, text_faults, too_small
from dew.cli.load import (
    Bos,
    Precision,
    announce_ends,
    bos_of,
    eos_of,
    load_to_train,
    texts,
    tokenizer_of,
)
from dew.cli.report import show
from dew.data import Packing, evaluation_batches
from dew.objectives.causal_lm import CausalLM
from dew.objectives.metrics import token_metrics
from dew.training.evaluation import Evaluation, run_evaluation
from dew.training.sharding import make_mesh, shardings_of


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Score a causal language model on text: perplexity over all its tokens."""

    model: str
    """Model to score: a Hugging Face folder, a hub id, or the folder of a dew run."""
    data: tuple[str, ...]
    """Text to score: .txt, .jsonl or .parquet files, or folders of them."""
    seq_len: int = 1024
    """Tokens per row; the context of a token starts at its row or document."""
    batch_size: int = 4
    """Rows scored at a time, over all processes."""
    dtype: Precision = "float32"
    """Precision of the forward pass."""
    road: Road = "auto"
    """How the model is loaded into JAX; auto is native where it can, else lowered."""
    ignore_fields: tuple[str, ...] = ()
    """Fields of config.json to ignore although transformers reads them."""
    packing: Packing = "wrapped"
    """Packing of documents into rows: wrapped pads nothing, best_fit splits no document
    that fits into a row, apart puts one document in each row."""
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
            "--model",
            self.model,
            road=self.road,
            ignore_fields=self.ignore_fields,
            needs_tokenizer=True,
            needs_head=True,
            seq_len=self.seq_len,
        )
        faults += text_faults("--data", self.data)
        refuse(
            [*faults, *too_small(self, 1, "batch_size"), *too_small(self, 2, "seq_len")]
        )

    def run(self) -> int:
        """Scores the text and prints its perplexity."""
        console = Console(stderr=True, quiet=jax.process_index() > 0)
        mesh = _process_mesh()
        documents = texts(self.data, field=self.text_field, console=console)
        source = load_to_train(
            self.model,
            dtype=self.dtype,
            road=self.road,
            ignore_fields=self.ignore_fields,
        )
        announce_ends(source, self.bos, console)
        evaluation = Evaluation(
            batches=lambda: evaluation_batches(
                documents,
                tokenizer=tokenizer_of(source),
                seq_len=self.seq_len,
                batch_size=self.batch_size,
                packing=self.packing,
                bos_id=bos_of(source, self.bos),
                eos_id=eos_of(source),
                shard=(jax.process_index(), jax.process_count()),
            ),
            metrics=token_metrics(),
        )
        objective = CausalLM(source=source, seq_len=self.seq_len)
        with console.status(f"scoring {len(documents)} documents"):
            variables = source.variables
            if mesh is not None:
                variables = jax.device_put(variables, shardings_of(variables, mesh))
            result = run_evaluation(
                objective, variables, evaluation, key=jax.random.key(0), mesh=mesh
            )
        result = {**result, "tokens": int(result["tokens"])}
        if math.isnan(result["nats_per_token"]) and result["tokens"]:
            raise ValueError(
                f"the loss of {source.address} on this text is not a number: its "
                "weights or hidden states are not finite (bfloat16 or float16 weights "
                "may overflow; try --dtype float32)"
            )
        rows = [
            ("perplexity", f"{result['perplexity']:.4f}"),
            ("nats per token", f"{result['nats_per_token']:.4f}"),
            ("tokens", f"{result['tokens']:,}"),
        ]
        show(source.address, rows, result, self.json)
        return 0


def _process_mesh() -> Mesh | None:
    """Returns a mesh of one device of each process; None where there is one process."""
    count = jax.process_count()
    if count == 1:
        return None
    first = {device.process_index: device for device in reversed(jax.devices())}
    return make_mesh(data=count, devices=[first[index] for index in range(count)])
