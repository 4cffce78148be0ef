"""`dew generate`: continuation of a prompt by a causal language model."""

import time
from dataclasses import dataclass
from typing import Annotated

import jax
import tyro
from rich.console import Console

from dew.api import Road
from dew.cli.inputs import model_faults, refuse, too_small
from dew.cli.load import Precision, load_to_train, tokenizer_of
from dew.cli.report import show
from dew.tasks.generation import TextGeneration


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a prompt with a causal language model."""

    model: str
    """Model to run: a Hugging Face folder, a hub id, or the folder of a dew run."""
    prompt: str
    """Text to continue."""
    max_new_tokens: int = 64
    """Maximum number of generated tokens."""
    temperature: float = 0.0
    """Sampling temperature; 0 always takes the most likely token."""
    seed: int = 0
    """Random seed for sampling."""
    dtype: Precision = "float32"
    """Precision of the forward pass."""
    road: Road = "auto"
    """How the model is loaded into JAX; auto is native where it can, else lowered."""
    ignore_fields: tuple[str, ...] = ()
    """Fields of config.json to ignore although transformers reads them."""
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
        )
        faults += too_small(self, 1, "max_new_tokens")
        refuse([*faults, *too_small(self, 0, "temperature", "seed")])

    def run(self) -> int:
        """Generates a continuation and prints it with its speed."""
        source = load_to_train(
            self.model,
            dtype=self.dtype,
            road=self.road,
            ignore_fields=self.ignore_fields,
        )
        tokenizer = tokenizer_of(source)
        task = TextGeneration(source, source.variables)
        rows = [tokenizer.encode(self.prompt).ids]

        def generate() -> list[int]:
            return task.continue_tokens(
                rows,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                key=jax.random.key(self.seed),
            )[0]

        with Console(stderr=True).status("compiling"):
            new = generate()
        # The first call compiles, so the second one is timed.
        began = time.perf_counter()
        generate()
        speed = len(new) / (time.perf_counter() - began)
        text = tokenizer.decode(new)
        result = {"text": text, "tokens_per_second": speed}
        table = [("text", self.prompt + text), ("tokens per second", f"{speed:.1f}")]
        show(source.address, table, result, self.json)
        return 0
