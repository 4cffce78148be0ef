"""`dew generate`: continue a prompt."""

import time
from dataclasses import dataclass
from typing import Annotated

import jax
import tyro
from rich.console import Console

from dew.api import Road
from dew.cli.load import Precision, load_to_train, tokenizer_of
from dew.cli.report import show
from dew.tasks.generation import TextGeneration


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a prompt with a causal language model."""

    model: str
    """Hugging Face folder, hub id, or a run of ours."""
    prompt: str
    """What to continue."""
    max_new_tokens: int = 64
    """Tokens to add at the most."""
    temperature: float = 0.0
    """0 takes the likeliest token; above it tokens are drawn."""
    seed: int = 0
    """Of the draws."""
    dtype: Precision = "float32"
    """What the model computes in."""
    road: Road = "auto"
    """The way into JAX; auto takes the native one."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object and no table."""

    def run(self) -> int:
        """Generates and prints."""
        source = load_to_train(self.model, dtype=self.dtype, road=self.road)
        tokenizer = tokenizer_of(source)
        task = TextGeneration(source, source.variables)
        rows = [tokenizer.encode(self.prompt).ids]

        def continued() -> list[int]:
            return task.continue_tokens(
                rows,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                key=jax.random.key(self.seed),
            )[0]

        with Console(stderr=True).status("compiling"):
            new = continued()
        # The second time is timed: the first one compiles.
        began = time.perf_counter()
        continued()
        speed = len(new) / (time.perf_counter() - began)
        text = tokenizer.decode(new)
        result = {"text": text, "tokens_per_second": speed}
        table = [("text", self.prompt + text), ("tokens per second", f"{speed:.1f}")]
        show(source.address, table, result, self.json)
        return 0
