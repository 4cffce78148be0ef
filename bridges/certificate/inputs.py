"""Inputs of the comparison with torch: long rows, padded texts, or an example."""

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
"""Inputs of models that read text alone, by torch's names."""

LONGEST, WRITTEN = 512, 64
"""Largest number of tokens in a row, and in the targets of a decoder."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One batch of inputs by name, and which of its positions [batch, seq] are real.

    `real` is None where the positions of outputs are not those of inputs.
    """

    inputs: Mapping[str, Any]
    real: np.ndarray | None = None

    @property
    def longest(self) -> int:
        """The number of tokens in a row, 0 for a model that reads none."""
        return 0 if "tokens" not in self.inputs else self.inputs["tokens"].shape[1]


def probes(loaded: Pretrained, reference: Any, texts: Sequence[str]) -> list[Probe]:
    """Returns the batches to compare: long rows and padded texts for text models.

    Other models get the example that they were lowered with.
    """
    match loaded.model:
        case Lowered(example=example) if not TEXTS.issuperset(example):
            return [Probe(inputs=example)]
    config = reference.config.get_text_config()
    # State-space models have no maximum length, and torch runs them step by step.
    length = min(LONGEST, config.to_dict().get("max_position_embeddings") or 64)
    drawn = np.random.default_rng(0).integers(0, config.vocab_size, length // 2)
    batches = [[drawn.tolist()]]
    if loaded.tokenizer is not None:
        manual = "\n\n".join(topics[name] for name in MANUAL)
        batches.append([loaded.tokenizer.encode(manual).ids[:length]])
        batches.append([loaded.tokenizer.encode(text).ids for text in texts])
    if "attention_mask" not in module_inputs(reference):
        # Without masks there is no padding.
        rows = [pad_right([row])["tokens"] for rows in batches for row in rows]
        return [Probe(inputs={"tokens": row}) for row in rows]
    inputs = [pad_right(rows) for rows in batches]
    if not reference.config.is_encoder_decoder:
        return [Probe(inputs=read, real=read["mask"]) for read in inputs]
    # Any decoder input will do: here, the first tokens of the encoder's.
    return [
        Probe(inputs={**read, DECODER_INPUTS: read["tokens"][:, :WRITTEN]})
        for read in inputs
    ]
