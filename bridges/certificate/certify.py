"""The certificate: a folder reloaded in transformers, and compared with ours.

It speaks of the folder as it lies on disk: which keys transformers missed or did not
expect, how far its answers are from ours over long and padded inputs, and whether both
continue the same prompts alike.
"""

import importlib.metadata
from collections.abc import Mapping, Sequence
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
"""What is continued where the caller gives no prompts."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What reloading a folder in transformers came to; `passed` sums it up.

    `unexpected` tensors that the source's family knows to mean nothing, old buffers and
    heads of pretraining, are named and are no fault. A model without a head is compared
    by its final states, and one that writes no text continues none.
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
    logits: Logits
    continuations: tuple[Continuation, ...]
    content_hash: str
    versions: dict[str, str]

    def json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


def certify(
    ours: Pretrained,
    folder: str | Path,
    *,
    prompts: Sequence[str] = (),
    new_tokens: int = 20,
) -> Certificate:
    """Reloads `folder` in transformers and compares it with `ours`, loaded from it.

    Both compute in float32 on the CPU; `ours` must have been loaded so. Nothing is
    raised for what the comparison finds: see `Certificate.faults`.
    """
    texts = tuple(prompts) or PROMPTS
    with quiet():
        theirs, report = _load(Path(folder), ours.config)
        logits = compare(ours, theirs, probes(ours, theirs, texts))
        written = continuations(ours, theirs, texts, new_tokens, logits.allowed)
    lists = {
        "missing": _names(report["missing_keys"]),
        "unexpected": _names(report["unexpected_keys"]),
        "mismatched": _names(report["mismatched_keys"]),
        "errors": _names(report["error_msgs"]),
    }
    tied, tie_faults = _tie(theirs)
    faults = [
        *_report_faults(ours, lists),
        *tie_faults,
        *_difference_faults(logits, written),
    ]
    return Certificate(
        passed=not faults,
        faults=tuple(faults),
        architecture=type(theirs).__name__,
        road=ours.road,
        parameters=sum(p.numel() for p in theirs.parameters()),
        **lists,
        tied=tied,
        logits=logits,
        continuations=written,
        content_hash=ours.content_hash,
        versions={
            name: importlib.metadata.version(name)
            for name in ("dew-bridge", "jax", "torch", "transformers")
        },
    )


def _report_faults(ours: Pretrained, lists: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What transformers said on loading, without what the table knows as left over."""
    return [
        f"{len(names)} {kind} in transformers' report: {', '.join(names[:5])}"
        for kind, listed in lists.items()
        if (names := [n for n in listed if not ours.table.ignores(n)])
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
    """Loads by the class that the config names; an adapter's is its base's config."""
    named = (config.get("architectures") or [""])[0]
    kind = getattr(transformers, named, transformers.AutoModelForCausalLM)
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


def _greedy_config(asked: Any) -> Any:
    """Only what a text begins and ends with.

    Penalties, beams and forced tokens are no part of a model, and would part two that
    are the same.
    """
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    said = asked.to_dict()
    return transformers.GenerationConfig(**{name: said.get(name) for name in kept})


def _names(entries: Any) -> tuple[str, ...]:
    return tuple(sorted(str(entry) for entry in entries))


def _tie(model: Any) -> tuple[bool, list[str]]:
    """Whether embedding and head are one tensor, and what is wrong with that."""
    head = model.get_output_embeddings()
    if head is None:
        return False, []
    shared = head.weight is model.get_input_embeddings().weight
    asked = bool(model.config.get_text_config().tie_word_embeddings)
    if asked == shared:
        return shared, []
    return shared, [
        f"config.json says tie_word_embeddings={asked}, but transformers has the head "
        + ("tied" if shared else "apart")
    ]


def continue_with_torch(folder: str | Path, prompt: str, new_tokens: int = 24) -> str:
    """Loads a folder in transformers and returns its greedy continuation of a prompt.

    The continuation alone; weights are computed in float32.
    """
    with quiet():
        model, _ = _load(Path(folder), {})
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(prompt).input_ids
        return tokenizer.decode(greedy(model, ids, new_tokens))
