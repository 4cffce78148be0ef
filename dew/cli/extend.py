"""`dew extend`: a model with more tokens."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro
from rich.console import Console

from dew import api as roads
from dew.cli.load import tokenizer_of
from dew.cli.report import show


@dataclass(frozen=True, kw_only=True)
class Extend:
    """Add tokens to a model; the row of a new one is the mean of those there were."""

    model: str
    """Hugging Face folder, hub id, or a run of ours."""
    out: Path
    """The folder to write; it must not be there yet."""
    add_tokens: tuple[str, ...]
    """The new tokens, such as "<tool>"."""
    special: bool = False
    """Leave them out when text is decoded without special tokens."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object and no table."""

    def run(self) -> int:
        """Extends, certifies and reports."""
        source = roads.load(self.model)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        # A folder of its own first: certifying needs a model that was loaded.
        with TemporaryDirectory(dir=self.out.parent, prefix=".extend-") as scratch:
            grown = roads.load(
                roads.extend_vocabulary(
                    source,
                    self.add_tokens,
                    Path(scratch) / "grown",
                    special=self.special,
                )
            )
            certificate = roads.save_certified(
                grown, self.out, console=Console(stderr=True)
            )
            rows = grown.table.variables["params", "embed", "weight"][0]
        tokenizer = tokenizer_of(grown)
        ids = {token: tokenizer.token_to_id(token) for token in self.add_tokens}
        proof = None if certificate is None else certificate.json()
        result = {"ids": ids, "vocab_size": rows, "certificate": proof}
        table = [(token, str(i)) for token, i in ids.items()]
        table.append(("rows of the tables", f"{rows:,}"))
        show(f"{self.model} → {self.out}", table, result, self.json)
        return 0
