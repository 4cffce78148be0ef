"""`dew extend`: new tokens in a model's vocabulary and tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro
from rich.console import Console

from dew import api
from dew.cli.inputs import (
    local_folder,
    model_faults,
    output_faults,
    refuse,
    row_faults,
)
from dew.cli.load import tokenizer_of
from dew.cli.report import show


@dataclass(frozen=True, kw_only=True)
class Extend:
    """Add tokens to a model, whose embeddings start as the mean of the old ones."""

    model: str
    """Model to extend: a Hugging Face folder, a hub id, or the folder of a dew run."""
    out: Path
    """Folder to write, which must not exist yet."""
    add_tokens: tuple[str, ...] = ()
    """New tokens, for example "<tool>"; none where the tokenizer has tokens without a
    row already, which then get one."""
    special: bool = False
    """Mark the tokens as special: decoding without special tokens omits them."""
    ignore_fields: tuple[str, ...] = ()
    """Fields of config.json to ignore although transformers reads them."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of a table."""

    def check(self) -> None:
        """Raises one ValueError that names every fault of flags and files."""
        faults = model_faults(
            "--model",
            self.model,
            road="native",
            ignore_fields=self.ignore_fields,
            needs_tokenizer=True,
        )
        faults += output_faults(self.out)
        if not self.add_tokens and not row_faults(self.model):
            faults.append("--add-tokens names no token")
        faults += [
            f"--add-tokens: {token!r} is empty"
            for token in self.add_tokens
            if not token.strip()
        ]
        twice = {t for t in self.add_tokens if self.add_tokens.count(t) > 1}
        faults += [f"--add-tokens: {t!r} is given twice" for t in sorted(twice)]
        folder = local_folder(self.model)
        if folder is not None and folder.tokenizer is not None:
            faults += [
                f"--add-tokens: {token!r} is in the vocabulary already"
                for token in dict.fromkeys(self.add_tokens)
                if folder.tokenizer.token_to_id(token) is not None
            ]
        refuse(faults)

    def run(self) -> int:
        """Extends, saves and certifies the model, and prints the new ids."""
        source = api.load(self.model, ignore_fields=self.ignore_fields)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        # Through a scratch folder, because a certificate is of a model that was loaded.
        with TemporaryDirectory(dir=self.out.parent, prefix=".extend-") as scratch:
            grown = api.load(
                api.extend_vocabulary(
                    source,
                    self.add_tokens,
                    Path(scratch) / "grown",
                    special=self.special,
                )
            )
            certificate = api.save_certified(
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
