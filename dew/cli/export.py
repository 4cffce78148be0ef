"""`dew export` and `dew verify`: certified folders for transformers."""

import json as json_format
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from dew import api
from dew.api import Road
from dew.cli.flags import OnOff
from dew.cli.inputs import (
    local_folder,
    model_faults,
    output_faults,
    refuse,
    run_faults,
)
from dew.cli.report import show
from dew.converters.lora.adapters import Adapted
from dew.converters.save import bytes_of


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a model as a Hugging Face folder, certified before it gets its name."""

    model: tyro.conf.Positional[str]
    """Model to export: a Hugging Face folder, a hub id, or the folder of a dew run."""
    out: tyro.conf.Positional[Path]
    """Folder to write, which must not exist yet."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Dtype of all floating-point tensors; by default each tensor keeps its own."""
    max_shard_size: str | None = None
    """Maximum size of a weight file, for example 5GB; by default as in the source."""
    merge: bool = False
    """Merge the adapter into the weights, and write the whole model."""
    adapter_only: bool = False
    """Write only the adapter's folder; an error for a model without an adapter."""
    road: Road = "auto"
    """How the model is loaded into JAX; auto is native where it can, else lowered."""
    ignore_fields: tuple[str, ...] = ()
    """Fields of config.json to ignore although transformers reads them."""
    verify_checkpoints: OnOff = "on"
    """Whether a run's checkpoint is compared with its checksums when it is read."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of a table."""

    def check(self) -> None:
        """Raises one ValueError that names every fault of flags and files."""
        faults = output_faults(self.out)
        if self.out.suffix == ".gguf":
            faults.append(
                f"{self.out} is a file's name, and dew export writes a folder: name a "
                "folder, which llama.cpp's convert_hf_to_gguf.py turns into a .gguf"
            )
        if api.is_run(self.model):
            faults += run_faults(self.model)
            if self.road != "auto" or self.ignore_fields:
                faults.append(
                    "--road and --ignore-fields are those of the run, which has its "
                    f"model loaded once: {self.model}"
                )
        else:
            faults += model_faults(
                "MODEL", self.model, road=self.road, ignore_fields=self.ignore_fields
            )
        try:
            bytes_of(self.max_shard_size)
        except ValueError as fault:
            faults.append(f"--max-shard-size: {fault}")
        if self.adapter_only and self.merge:
            faults.append(
                "--adapter-only writes the adapter alone, and --merge ends it"
            )
        whole = local_folder(self.model)
        if whole is not None and not api.is_run(self.model):
            if self.adapter_only:
                faults.append(
                    f"--adapter-only needs a model with an adapter, and {self.model} "
                    "has none"
                )
            if self.merge:
                faults.append(f"--merge: {self.model} has no adapter to merge")
        refuse(faults)

    def run(self) -> int:
        """Exports and certifies the model, and prints the result."""
        console = Console(stderr=True)
        task: api.Saveable
        if api.is_run(self.model):
            task = api.trained(self.model, verify=self.verify_checkpoints == "on")
        else:
            task = api.load(
                self.model, road=self.road, ignore_fields=self.ignore_fields
            )
        if self.adapter_only and (self.merge or not isinstance(task.source, Adapted)):
            raise ValueError(
                "--adapter-only needs a model with an adapter, and no --merge; "
                f"{self.model} has none, or --merge was given"
            )
        certificate = api.save_certified(
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
    """Reload a folder in transformers and compare its logits with those of dew."""

    folder: tyro.conf.Positional[str]
    """Folder to verify: a Hugging Face folder, or the folder of a dew run."""
    road: Road = "auto"
    """How the model is loaded into JAX; auto is native where it can, else lowered."""
    ignore_fields: tuple[str, ...] = ()
    """Fields of config.json to ignore although transformers reads them."""
    prompt_file: Path | None = None
    """Text file with one prompt per line, whose continuations are compared too."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the certificate as one JSON object instead of a table."""

    def check(self) -> None:
        """Raises one ValueError that names every fault of flags and files."""
        faults = model_faults(
            "FOLDER", self.folder, road=self.road, ignore_fields=self.ignore_fields
        )
        if self.prompt_file is not None:
            try:
                _prompts(self.prompt_file)
            except (ValueError, OSError) as fault:
                faults.append(f"--prompt-file: {fault}")
        if not api.has_torch():
            faults.append(f"dew verify needs torch and transformers: {api.INSTALL}")
        refuse(faults)

    def run(self) -> int:
        """Prints the certificate; returns 1 if the comparison did not pass."""
        prompts = () if self.prompt_file is None else _prompts(self.prompt_file)
        with Console(stderr=True).status("reloading in transformers"):
            proof = api.certify(
                self.folder,
                prompts=prompts,
                road=self.road,
                ignore_fields=self.ignore_fields,
            ).json()
        show(self.folder, proof_rows(proof), proof, self.json)
        return 0 if proof["passed"] else 1


def proof_rows(proof: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns a certificate as rows of a table, for people."""
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
    if proof["ignored_fields"]:
        rows.append(
            ("fields of config.json without effect", ", ".join(proof["ignored_fields"]))
        )
    rows.append(("passed", "yes" if proof["passed"] else "; ".join(proof["faults"])))
    return rows


def _prompts(path: Path) -> tuple[str, ...]:
    """Returns the lines of a file that are not blank.

    Raises:
        ValueError: the file does not exist, or has no such line.
    """
    if not path.is_file():
        raise ValueError(f"there is no prompt file {path}")
    lines = tuple(line for line in path.read_text("utf-8").splitlines() if line.strip())
    if not lines:
        raise ValueError(f"the prompt file {path} has no prompt")
    return lines
