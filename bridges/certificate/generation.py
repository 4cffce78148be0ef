"""Texts as both sides write them, greedily: torch and us."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dew.converters.pretrained import Pretrained
from dew.tasks.generation import TextGeneration
from dew.tasks.seq2seq_generation import TargetGeneration, pad_right


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """One prompt, continued greedily by both; an encoder-decoder answers it.

    Where the texts part, `gap` is how much torch's two likeliest logits differ there: a
    gap smaller than the allowed difference is a tie, which either may break.
    """

    prompt: str
    torch: str
    dew: str
    equal: bool
    gap: float | None = None


def continuations(
    ours: Pretrained, theirs: Any, texts: Sequence[str], new_tokens: int, tie: float
) -> tuple[Continuation, ...]:
    """Has both continue every prompt, where the model writes text from text."""
    tokenizer = ours.tokenizer
    writes = theirs.can_generate() and theirs.main_input_name == "input_ids"
    if tokenizer is None or not writes:
        return ()
    rows = [tokenizer.encode(text).ids for text in texts]
    compared = []
    mine = _dew_continuations(ours, theirs, rows, new_tokens)
    for text, row, new in zip(texts, rows, mine, strict=True):
        want = greedy(theirs, row, new_tokens)
        gap = None if want == new else _logit_gap(theirs, row, want, new)
        compared.append(
            Continuation(
                prompt=text,
                torch=tokenizer.decode(want),
                dew=tokenizer.decode(new),
                equal=gap is None or gap < tie,
                gap=gap,
            )
        )
    return tuple(compared)


def _dew_continuations(
    ours: Pretrained, theirs: Any, rows: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    if not theirs.config.is_encoder_decoder:
        task = TextGeneration(ours, ours.variables)
        return task.continue_tokens(rows, max_new_tokens=new_tokens)
    writer = TargetGeneration(ours, ours.variables, _decoder_start_id(theirs))
    return writer.write(pad_right(rows), max_new_tokens=new_tokens)


def greedy(model: Any, ids: Sequence[int], new_tokens: int) -> list[int]:
    """Torch's greedy continuation of one row of ids, or what it answers to it."""
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
    read = 1 if model.config.is_encoder_decoder else len(ids)
    return whole[0, read:].tolist()


def _decoder_start_id(model: Any) -> int:
    """The token that a decoder begins with."""
    said = model.generation_config
    return (
        said.bos_token_id
        if said.decoder_start_token_id is None
        else said.decoder_start_token_id
    )


def _logit_gap(model: Any, ids: list[int], want: list[int], got: list[int]) -> float:
    """How far apart torch's two likeliest logits are where the continuations part."""
    shared = 0
    while shared < min(len(want), len(got)) and want[shared] == got[shared]:
        shared += 1
    if model.config.is_encoder_decoder:
        begun = torch.tensor([[_decoder_start_id(model), *want[:shared]]])
        inputs = {"input_ids": torch.tensor([ids]), "decoder_input_ids": begun}
    else:
        inputs = {"input_ids": torch.tensor([ids + want[:shared]])}
    with torch.inference_mode():
        logits = model(**inputs).logits[0, -1]
    best = torch.topk(logits, 2).values
    return float(best[0] - best[1])
