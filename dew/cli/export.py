"""`dew export` and `dew verify`: a folder for transformers, and the proof of one."""

import json as json_format
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from dew import api as roads
from dew.cli.report import show
from dew.converters.lora.adapters import Adapted


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a model as a Hugging Face folder, certified before it takes its name."""

    model: tyro.conf.Positional[str]
    """Hugging Face folder, hub id, or a run of ours."""
    out: tyro.conf.Positional[Path]
    """The folder to write; it must not be there yet."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Of all floating tensors; by default each keeps its own."""
    max_shard_size: str | None = None
    """Such as 5GB; by default the sharding stays as it is."""
    merge: bool = False
    """Write a model with its adapter merged in, in place of the adapter's folder."""
    adapter_only: bool = False
    """Insist on the adapter's folder, and refuse a model that has none."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object and no table."""

    def run(self) -> int:
        """Exports, certifies and reports."""
        console = Console(stderr=True)
        is_run = roads.is_run(self.model)
        task = roads.trained(self.model) if is_run else roads.load(self.model)
        if self.adapter_only and (self.merge or not isinstance(task.source, Adapted)):
            raise ValueError(
                f"--adapter-only writes an adapter's folder; {self.model} has none, or "
                "--merge asks for the whole model"
            )
        certificate = roads.save_certified(
            task,
            self.out,
            console=console,
            dtype=self.dtype,
            max_shard_size=self.max_shard_size,
            merge=self.merge,
        )
        files = {p.name: p.stat().st_size for p in sorted(self.out.iterdir())}
        proof = None if certificate is None else certificate.json()
        result = {"files": files, "certificate": proof}
        rows = [(name, f"{size:,} bytes") for name, size in files.items()]
        rows += [] if proof is None else proof_rows(proof)
        show(f"{self.model} → {self.out}", rows, result, self.json)
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Reload a folder in transformers and compare it with our own forward."""

    folder: tyro.conf.Positional[str]
    """Hugging Face folder, or a run of ours."""
    prompt_file: Path | None = None
    """A text file with one prompt a line, to be continued by both."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the certificate as JSON."""

    def run(self) -> int:
        """Prints the certificate; 1 says that it did not pass."""
        prompts = () if self.prompt_file is None else _prompts(self.prompt_file)
        with Console(stderr=True).status("reloading in transformers"):
            proof = roads.certify(self.folder, prompts=prompts).json()
        show(self.folder, proof_rows(proof), proof, self.json)
        return 0 if proof["passed"] else 1


def proof_rows(proof: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A certificate as rows of a table."""
    logits = proof["logits"]
    lists = ("missing", "unexpected", "mismatched")
    rows = [
        (
            "architecture",
            f"{proof['architecture']}, {proof['parameters']:,} parameters",
        ),
        (f"{', '.join(lists)} keys", ", ".join(str(len(proof[k])) for k in lists)),
        (
            "largest logit difference from torch",
            f"{logits['largest_difference']:.2g} of {logits['scale']:.3g} over "
            f"{logits['positions']} positions (allowed: {logits['allowed']:.2g})",
        ),
        ("same likeliest token", f"{logits['argmax_agreement']:.2%}"),
    ]
    for text in proof["continuations"]:
        verdict = "same" if text["equal"] else "NOT the same"
        rows.append(
            (f"{verdict} in torch", json_format.dumps(text["prompt"] + text["dew"]))
        )
    rows.append(("passed", "yes" if proof["passed"] else "; ".join(proof["faults"])))
    return rows


def _prompts(path: Path) -> tuple[str, ...]:
    """The lines of a file.

    Raises:
        ValueError: there is no such file, or nothing in it.
    """
    if not path.is_file():
        raise ValueError(f"there is no prompt file {path}")
    lines = tuple(line for line in path.read_text("utf-8").splitlines() if line.strip())
    if not lines:
        raise ValueError(f"the prompt file {path} holds no prompt")
    return lines
