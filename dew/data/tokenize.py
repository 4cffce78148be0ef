"""Tokenization of whole documents into token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

Tokens: TypeAlias = Int32[np.ndarray, "_"]
"""Tokens of a document or a part of one; of any length, so the axis has no name."""


@dataclass(frozen=True, kw_only=True)
class Encode:
    """Tokenizes whole documents, each between `bos_id` and `eos_id` where given.

    The tokenizer's own template, truncation and padding are not applied. A document
    without tokens stays empty: it gets no `bos_id` or `eos_id` either. `bos_id` may be
    several tokens, as `template_prefix` returns them.
    """

    tokenizer: Tokenizer
    bos_id: int | tuple[int, ...] | None = None
    eos_id: int | None = None

    def __post_init__(self) -> None:
        ids = [("bos_id", token) for token in self._before]
        ids += [] if self.eos_id is None else [("eos_id", self.eos_id)]
        faults = [
            f"{name} must be one of the tokenizer's {self.tokenizer.get_vocab_size()} "
            f"tokens, got {token}"
            for name, token in ids
            if token < 0 or self.tokenizer.id_to_token(token) is None
        ]
        if faults:
            raise ValueError("; ".join(faults))
        if self.tokenizer.truncation or self.tokenizer.padding:
            # A tokenizer.json may hold either, and would cut documents in silence. The
            # caller's own tokenizer is left as it is.
            tokenizer = Tokenizer.from_str(self.tokenizer.to_str())
            tokenizer.no_truncation()
            tokenizer.no_padding()
            object.__setattr__(self, "tokenizer", tokenizer)

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the tokens of each document, of any number of documents.

        The Rust side spreads one call over the cores; Python threads do not, 16 of them
        on 2 cores being half as fast as one.
        """
        encodings = self.tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return [self._with_bos_and_eos(encoding.ids) for encoding in encodings]

    def _with_bos_and_eos(self, ids: list[int]) -> Tokens:
        if not ids:
            return np.zeros(0, np.int32)
        after = [] if self.eos_id is None else [self.eos_id]
        return np.asarray([*self._before, *ids, *after], np.int32)

    @property
    def _before(self) -> tuple[int, ...]:
        """The tokens before every document."""
        if self.bos_id is None:
            return ()
        return self.bos_id if isinstance(self.bos_id, tuple) else (self.bos_id,)


def template_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that a tokenizer's template puts before a text, mostly BOS.

    Those of the template alone: a text that begins with such a token gets it again.
    """
    sequences = tokenizer.encode("a").sequence_ids
    count = next((i for i, place in enumerate(sequences) if place is not None), 0)
    return tuple(tokenizer.encode("a").ids[:count])
