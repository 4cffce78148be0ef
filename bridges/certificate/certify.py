"""The certificate: a folder reloaded in transformers and compared with dew's model.

It covers the folder as it is on disk: which keys transformers missed or did not
expect, how far its outputs are from dew's over long and padded inputs, and whether both
continue the same prompts alike.
"""

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from dew.bridges.certificate.generation import Continuation, continuations, greedy
from dew.bridges.certificate.inputs import probes
from dew.bridges.certificate.logits import Logits, compare
from dew.bridges.certificate.quiet import quiet
from dew.converters.pretrained import Pretrained

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, there was a little robot who",
)
"""Prompts to continue if the caller gives none."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The result of reloading a folder in transformers; `passed` without any fault.

    `unexpected` tensors that the family lists as meaningless, such as old buffers and
    heads of pretraining, are listed and are not a fault. A model without a head is
    compared by its final hidden states, and one that generates no text has no
    continuations.
    """

    passed: bool
    faults: tuple[str, ...]
    architecture: str
    road: str
    parameters: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    errors: tuple[str, ...]
    tied: bool
    ignored_fields: tuple[str, ...]
    logits: Logits
    continuations: tuple[Continuation, ...]
    content_hash: str
    versions: dict[str, str]

    def json(self) -> dict[str, object]:
        """Returns the certificate as plain JSON values."""
        return asdict(self)


def certify(
    loaded: Pretrained,
    folder: str | Path,
    *,
    prompts: Sequence[str] = (),
    new_tokens: int = 20,
) -> Certificate:
    """Reloads `folder` in transformers and compares it with `loaded`, dew's model.

    Both compute in float32 on the CPU; `loaded` must have been loaded so. Differences
    are not raised but listed: see `Certificate.faults`.
    """
    texts = tuple(prompts) or PROMPTS
    with quiet():
        # Logits first: the difference that they are allowed decides which continuations
        # count as ties.
        reference, report = _load(Path(folder), loaded.config)
        logits = compare(loaded, reference, probes(loaded, reference, texts))
        written = continuations(loaded, reference, texts, new_tokens, logits.allowed)
    lists = {
        "missing": _names(report["missing_keys"]),
        "unexpected": _names(report["unexpected_keys"]),
        "mismatched": _names(report["mismatched_keys"]),
        "errors": _names(report["error_msgs"]),
    }
    tied, tie_faults = _tie(reference)
    faults = [
        *_report_faults(loaded, lists),
        *tie_faults,
        *_difference_faults(logits, written),
    ]
    return Certificate(
        passed=not faults,
        faults=tuple(faults),
        architecture=type(reference).__name__,
        road=loaded.road,
        parameters=sum(p.numel() for p in reference.parameters()),
        **lists,
        tied=tied,
        ignored_fields=loaded.ignored_fields,
        logits=logits,
        continuations=written,
        content_hash=loaded.content_hash,
        versions={
            name: importlib.metadata.version(name)
            for name in ("dew-bridge", "jax", "torch", "transformers")
        },
    )


def _report_faults(
    loaded: Pretrained, lists: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Returns the faults in transformers' loading report, less ignored tensors."""
    return [
        f"{len(names)} {kind} in transformers' report: {', '.join(names[:5])}"
        for kind, listed in lists.items()
        if (names := [n for n in listed if not loaded.table.ignores(n)])
    ]


def _difference_faults(logits: Logits, written: Sequence[Continuation]) -> list[str]:
    faults = [
        f"{c.prompt!r} goes on as {c.torch!r} in torch and as {c.dew!r} here"
        for c in written
        if not c.equal
    ]
    if not logits.largest_difference <= logits.allowed:
        faults.insert(
            0,
            f"{logits.output} differ by {logits.largest_difference:.3g}, more than "
            f"{logits.allowed:.3g}",
        )
    return faults


def _load(folder: Path, config: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Loads by the class that the config names; an adapter has its base's config."""
    architecture = (config.get("architectures") or [""])[0]
    kind = getattr(transformers, architecture, transformers.AutoModelForCausalLM)
    # Eager attention is the reference; `compare` also runs sdpa, to see by how much
    # torch differs from itself.
    loaded: Any = kind.from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
        attn_implementation="eager",
    )
    model, report = loaded
    if model.can_generate():
        model.generation_config = _greedy_config(model.generation_config)
    return model.eval(), report


def _greedy_config(
    config: transformers.GenerationConfig,
) -> transformers.GenerationConfig:
    """Returns the special tokens of a generation config and nothing else.

    Penalties, beams and forced tokens are not part of a model, and would make two that
    are the same continue differently.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    fields = config.to_dict()
    return transformers.GenerationConfig(**{name: fields.get(name) for name in names})


def _names(entries: Iterable[object]) -> tuple[str, ...]:
    return tuple(sorted(str(entry) for entry in entries))


def _tie(model: Any) -> tuple[bool, list[str]]:
    """Returns whether embedding and head are one tensor, and faults of the config."""
    head = model.get_output_embeddings()
    if head is None:
        return False, []
    shared = head.weight is model.get_input_embeddings().weight
    configured = bool(model.config.get_text_config().tie_word_embeddings)
    if configured == shared:
        return shared, []
    return shared, [
        f"config.json says tie_word_embeddings={configured}, but transformers has the "
        + "head "
        + ("tied" if shared else "apart")
    ]


def continue_with_torch(folder: str | Path, prompt: str, new_tokens: int = 24) -> str:
    """Loads a folder in transformers and returns its greedy continuation of a prompt.

    The prompt is not part of it; weights are float32.
    """
    with quiet():
        model, _ = _load(Path(folder), {})
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(prompt).input_ids
        return tokenizer.decode(greedy(model, ids, new_tokens))
