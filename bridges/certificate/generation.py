"""Greedy continuations of the same prompts by torch and by dew."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dew.converters.pretrained import Pretrained
from dew.tasks.generation import TextGeneration
from dew.tasks.seq2seq_generation import TargetGeneration, pad_right


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """One prompt and its greedy continuation by torch and by dew.

    An encoder-decoder reads the prompt and generates a target. Where the texts first
    differ, `gap` is the difference of torch's two largest logits: a gap smaller than
    the allowed difference is a tie, which either may break.
    """

    prompt: str
    torch: str
    dew: str
    equal: bool
    gap: float | None = None


def continuations(
    loaded: Pretrained,
    reference: Any,
    texts: Sequence[str],
    new_tokens: int,
    tie: float,
) -> tuple[Continuation, ...]:
    """Continues every prompt by both, for models that generate text from text.

    `tie` is the difference of logits below which differing tokens count as equal.
    """
    tokenizer = loaded.tokenizer
    generates = reference.can_generate() and reference.main_input_name == "input_ids"
    if tokenizer is None or not generates:
        return ()
    rows = [tokenizer.encode(text).ids for text in texts]
    compared = []
    continued = _dew_continuations(loaded, reference, rows, new_tokens)
    for text, row, new in zip(texts, rows, continued, strict=True):
        want = greedy(reference, row, new_tokens)
        gap = None if want == new else _logit_gap(reference, row, want, new)
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
    loaded: Pretrained, reference: Any, rows: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    if not reference.config.is_encoder_decoder:
        task = TextGeneration(loaded, loaded.variables)
        return task.continue_tokens(rows, max_new_tokens=new_tokens)
    writer = TargetGeneration(loaded, loaded.variables, _decoder_start_id(reference))
    return writer.write(pad_right(rows), max_new_tokens=new_tokens)


def greedy(model: Any, ids: Sequence[int], new_tokens: int) -> list[int]:
    """Returns torch's greedy continuation of one row of ids, or an encoder's target."""
    with torch.inference_mode():
        ids_out = model.generate(
            torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
    skip = 1 if model.config.is_encoder_decoder else len(ids)
    return ids_out[0, skip:].tolist()


def _decoder_start_id(model: Any) -> int:
    """Returns the token id that a decoder begins with."""
    config = model.generation_config
    return (
        config.bos_token_id
        if config.decoder_start_token_id is None
        else config.decoder_start_token_id
    )


def _logit_gap(model: Any, ids: list[int], want: list[int], got: list[int]) -> float:
    """Difference of torch's two largest logits where the continuations first differ."""
    shared = 0
    while shared < min(len(want), len(got)) and want[shared] == got[shared]:
        shared += 1
    if model.config.is_encoder_decoder:
        prefix = torch.tensor([[_decoder_start_id(model), *want[:shared]]])
        inputs = {"input_ids": torch.tensor([ids]), "decoder_input_ids": prefix}
    else:
        inputs = {"input_ids": torch.tensor([ids + want[:shared]])}
    with torch.inference_mode():
        logits = model(**inputs).logits[0, -1]
    best = torch.topk(logits, 2).values
    return float(best[0] - best[1])
