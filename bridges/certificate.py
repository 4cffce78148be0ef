"""The certificate: a folder reloaded in transformers, and compared with ours.

It speaks of the folder as it lies on disk: which keys transformers missed or did not
expect, how far its logits are from ours over long and padded inputs, and whether both
continue the same prompts alike.
"""

import importlib.metadata
import warnings
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import transformers

from dew.converters.pretrained import Pretrained
from dew.tasks.text import TextGeneration

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, there was a little robot who",
)
"""What is continued where the caller gives no prompts."""

ABSOLUTE = 1e-4
RELATIVE = 2e-5
OWN = 4.0
"""Logits may differ by ABSOLUTE, by RELATIVE of the largest, or by OWN times what two
ways of attention differ by in torch itself, whichever is most. A model that magnifies
rounding does so in every framework: after 16 steps of training, SmolLM2 in torch is
1.4e-3 from its float64 logits at one of 512 random tokens, and 1e-4 at most others.
"""


@dataclass(frozen=True, kw_only=True)
class Logits:
    """How far two forwards are apart, in float32.

    `torch_own_difference` is what torch's `eager` and `sdpa` attention differ by.
    `scale` is the largest logit; `argmax_agreement` the share of positions whose
    likeliest token is the same.
    """

    largest_difference: float
    torch_own_difference: float
    allowed: float
    scale: float
    argmax_agreement: float
    positions: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """One prompt, continued greedily by both.

    Where the texts part, `gap` is how much torch's two likeliest logits differ there: a
    gap smaller than the allowed difference is a tie, which either may break.
    """

    prompt: str
    torch: str
    dew: str
    equal: bool
    gap: float | None = None


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
    with _quiet():
        theirs, report = _load(Path(folder), ours.config)
    lists = {
        "missing": _names(report["missing_keys"]),
        "unexpected": _names(report["unexpected_keys"]),
        "mismatched": _names(report["mismatched_keys"]),
        "errors": _names(report["error_msgs"]),
    }
    texts = tuple(prompts) or PROMPTS
    logits = _compare_logits(ours, theirs, texts)
    continuations = ()
    if theirs.can_generate():
        continuations = _compare_texts(ours, theirs, texts, new_tokens, logits.allowed)
    tied, tie_faults = _tie(theirs)
    faults = [
        *_report_faults(ours, lists),
        *tie_faults,
        *_difference_faults(logits, continuations),
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
        continuations=continuations,
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


def _difference_faults(
    logits: Logits, continuations: Sequence[Continuation]
) -> list[str]:
    faults = [
        f"{c.prompt!r} goes on as {c.torch!r} in torch and as {c.dew!r} here"
        for c in continuations
        if not c.equal
    ]
    if not logits.largest_difference <= logits.allowed:
        faults.insert(
            0,
            f"logits differ by {logits.largest_difference:.3g}, more than "
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
    return model.eval(), report


def _names(entries: Any) -> tuple[str, ...]:
    return tuple(sorted(str(entry) for entry in entries))


def _tie(model: Any) -> tuple[bool, list[str]]:
    """Whether embedding and head are one tensor, and what is wrong with that."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    shared = head is not None and head.weight is table.weight
    asked = bool(model.config.get_text_config().tie_word_embeddings)
    if asked == shared or head is None:
        return shared, []
    return shared, [
        f"config.json says tie_word_embeddings={asked}, but transformers has the head "
        + ("tied" if shared else "apart")
    ]


def _compare_logits(ours: Pretrained, theirs: Any, texts: Sequence[str]) -> Logits:
    """Compares over long rows and over padded ones."""
    difference = own = scale = 0.0
    agreed, positions, longest = 0, 0, 0
    for ids, mask in _inputs(ours, theirs, texts):
        want, again = (_forward(theirs, ids, mask, way) for way in ("eager", "sdpa"))
        got = _rows(_said(ours, theirs, ids, mask), mask)
        want, again = _rows(want, mask), _rows(again, mask)
        difference = max(difference, float(np.abs(got - want).max()))
        own = max(own, float(np.abs(again - want).max()))
        scale = max(scale, float(np.abs(want).max()))
        agreed += int((got.argmax(-1) == want.argmax(-1)).sum())
        positions += len(want)
        longest = max(longest, ids.shape[1])
    return Logits(
        largest_difference=difference,
        torch_own_difference=own,
        allowed=max(ABSOLUTE, RELATIVE * scale, OWN * own),
        scale=scale,
        argmax_agreement=agreed / positions,
        positions=positions,
        longest=longest,
    )


def _forward(model: Any, ids: np.ndarray, mask: np.ndarray, way: str) -> np.ndarray:
    """Torch's logits, by the attention of that name where the model has it."""
    if way == "sdpa" and not model._supports_sdpa:
        way = "eager"
    model.set_attn_implementation(way)
    with torch.inference_mode():
        said = model(
            torch.from_numpy(ids).long(), attention_mask=torch.from_numpy(mask).long()
        )
    return (said.logits if "logits" in said else said.last_hidden_state).numpy()


def _said(
    ours: Pretrained, theirs: Any, ids: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Our logits, or the final states where torch's model has no head."""
    if theirs.base_model is not theirs:
        return ours.logits(ids, mask)
    inputs = {"tokens": np.asarray(ids, np.int32), "mask": np.asarray(mask, bool)}
    return np.asarray(ours.model.apply(ours.variables, inputs, method="hidden"))


def _rows(said: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """A row for each real position, or for each text where a text has one answer."""
    if said.shape[:2] != mask.shape:
        return said
    rows = said[mask.astype(bool)]
    return rows if rows.ndim > 1 else rows[:, None]


def _inputs(
    ours: Pretrained, theirs: Any, texts: Sequence[str]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and masks: real text and random ids in long rows, texts padded right."""
    config = theirs.config.get_text_config()
    # State-space models have no longest text, and torch unrolls theirs step by step.
    length = min(512, config.to_dict().get("max_position_embeddings") or 64)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, config.vocab_size, length // 2).tolist()]
    tokenizer = ours.tokenizer
    if tokenizer is None:
        return [_padded(rows)]
    manual = "\n\n".join(topics[name] for name in ("assert", "for", "with", "lambda"))
    rows.append(tokenizer.encode(manual).ids[:length])
    short = [tokenizer.encode(text).ids for text in texts]
    return [_padded([row]) for row in rows] + [_padded(short)]


def _padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as one array, and its mask."""
    width = max(len(row) for row in rows)
    ids = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    mask = np.arange(width)[None, :] < np.array([[len(row)] for row in rows])
    return ids, mask.astype(np.int32)


def _compare_texts(
    ours: Pretrained,
    theirs: Any,
    texts: Sequence[str],
    new_tokens: int,
    tie: float,
) -> tuple[Continuation, ...]:
    """Continues every prompt greedily with both."""
    tokenizer = ours.tokenizer
    if tokenizer is None:
        return ()
    task = TextGeneration(ours, ours.variables)
    rows = [tokenizer.encode(text).ids for text in texts]
    mine = task.continue_tokens(rows, max_new_tokens=new_tokens)
    continuations = []
    for text, row, new in zip(texts, rows, mine, strict=True):
        want = greedy(theirs, row, new_tokens)
        gap = None if want == new else _gap(theirs, row, want, new)
        continuations.append(
            Continuation(
                prompt=text,
                torch=tokenizer.decode(want),
                dew=tokenizer.decode(new),
                equal=gap is None or gap < tie,
                gap=gap,
            )
        )
    return tuple(continuations)


def greedy(model: Any, ids: Sequence[int], new_tokens: int) -> list[int]:
    """Torch's greedy continuation of one row of ids."""
    with torch.inference_mode(), _quiet():
        whole = model.generate(
            torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
    return whole[0, len(ids) :].tolist()


def _gap(model: Any, ids: list[int], want: list[int], got: list[int]) -> float:
    """How far apart torch's two likeliest logits are where the continuations part."""
    shared = 0
    while shared < min(len(want), len(got)) and want[shared] == got[shared]:
        shared += 1
    with torch.inference_mode():
        logits = model(torch.tensor([ids + want[:shared]])).logits[0, -1]
    best = torch.topk(logits, 2).values
    return float(best[0] - best[1])


@contextmanager
def _quiet() -> Any:
    """Keeps transformers' own bars and warnings off the screen for a while."""
    logger = transformers.utils.logging
    level = logger.get_verbosity()
    logger.set_verbosity_error()
    logger.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # PEFT asks transformers by names that are going away.
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.set_verbosity(level)
        logger.enable_progress_bar()


def continue_with_torch(folder: str | Path, prompt: str, new_tokens: int = 24) -> str:
    """Loads a folder in transformers and returns its greedy continuation of a prompt.

    The continuation alone; weights are computed in float32.
    """
    with _quiet():
        model, _ = _load(Path(folder), {})
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt).input_ids
    return tokenizer.decode(greedy(model, ids, new_tokens))
