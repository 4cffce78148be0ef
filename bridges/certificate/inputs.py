"""What two forwards are compared on: a small batch of a module's kind, or texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from dew.bridges.lowering.examples import MANUAL
from dew.bridges.lowering.model import Lowered
from dew.bridges.names import module_inputs
from dew.converters.pretrained import Pretrained
from dew.tasks.seq2seq_generation import DECODER_INPUTS, pad_right

TEXTS = frozenset(("input_ids", "attention_mask", "token_type_ids", DECODER_INPUTS))
"""What a model that reads text alone takes, by torch's names."""

LONGEST, WRITTEN = 512, 64
"""Tokens of the longest rows to read, and of what decoders have written by then."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One batch of inputs by name, and which of its positions [batch, seq] are real.

    `real` is None where positions of answers are not those of what was read.
    """

    inputs: Mapping[str, Any]
    real: np.ndarray | None = None

    @property
    def longest(self) -> int:
        """Tokens in a row, 0 where none are read."""
        return 0 if "tokens" not in self.inputs else self.inputs["tokens"].shape[1]


def probes(ours: Pretrained, theirs: Any, texts: Sequence[str]) -> list[Probe]:
    """Returns what to compare on: long rows and padded texts for models of text.

    Other models read the example that they were lowered on.
    """
    match ours.model:
        case Lowered(example=example) if not TEXTS.issuperset(example):
            return [Probe(inputs=example)]
    config = theirs.config.get_text_config()
    # State-space models have no longest text, and torch unrolls theirs step by step.
    length = min(LONGEST, config.to_dict().get("max_position_embeddings") or 64)
    drawn = np.random.default_rng(0).integers(0, config.vocab_size, length // 2)
    batches = [[drawn.tolist()]]
    if ours.tokenizer is not None:
        manual = "\n\n".join(topics[name] for name in MANUAL)
        batches.append([ours.tokenizer.encode(manual).ids[:length]])
        batches.append([ours.tokenizer.encode(text).ids for text in texts])
    if "attention_mask" not in module_inputs(theirs):
        # Without masks there is no padding.
        rows = [pad_right([row])["tokens"] for rows in batches for row in rows]
        return [Probe(inputs={"tokens": row}) for row in rows]
    inputs = [pad_right(rows) for rows in batches]
    if not theirs.config.is_encoder_decoder:
        return [Probe(inputs=read, real=read["mask"]) for read in inputs]
    # A decoder may be given anything: the start of what its encoder reads, here.
    return [
        Probe(inputs={**read, DECODER_INPUTS: read["tokens"][:, :WRITTEN]})
        for read in inputs
    ]
