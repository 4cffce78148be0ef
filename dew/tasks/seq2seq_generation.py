"""Greedy generation of the target sequence with an encoder-decoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dew.tasks.generation import until_end
from dew.tasks.scoring import Inputs, Scoring
from dew.typing import Model, Variables

DECODER_INPUTS = "decoder_input_ids"
"""The name of the decoder's input tokens, as torch has it."""


@dataclass(frozen=True, eq=False)
class TargetGeneration(Scoring):
    """An encoder-decoder that generates the target of each source from `start_id` on.

    Decoding is greedy and without a cache: encoder and decoder are evaluated again for
    every token.
    """

    start_id: int

    def generate(self, sources: Sequence[str], *, max_new_tokens: int) -> list[str]:
        """Returns the target text of each source text.

        Raises:
            ValueError: the source has no tokenizer, or an argument is out of range.
        """
        tokenizer = self.source.tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer; use write")
        rows = [e.ids for e in tokenizer.encode_batch(list(sources))]
        inputs = pad_right(rows)
        new = self.write(inputs, max_new_tokens=max_new_tokens)
        return [tokenizer.decode(ids, skip_special_tokens=True) for ids in new]

    def write(self, inputs: Inputs, *, max_new_tokens: int) -> list[list[int]]:
        """Returns the target ids of each row of the encoder's `inputs`.

        They go up to and with the first end token; `start_id` is left out.

        Raises:
            ValueError: `max_new_tokens` is less than 1.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
        model, ends = self.source.model, self.source.eos_ids
        new = _greedy_targets(
            model, max_new_tokens, self.start_id, ends, self.variables, dict(inputs)
        )
        return [until_end(row, ends) for row in np.asarray(new).tolist()]


def pad_right(rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Rows of ids as `tokens` [batch, seq], padded with 0 on the right, and `mask`.

    Raises:
        ValueError: the rows hold no token at all.
    """
    width = max((len(row) for row in rows), default=0)
    if width == 0:
        raise ValueError(f"there must be a row with a token, got {list(rows)}")
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = np.array([[len(row)] for row in rows])
    return {"tokens": tokens, "mask": np.arange(width)[None] < lengths}


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _greedy_targets(
    model: Model,
    new: int,
    start_id: int,
    ends: tuple[int, ...],
    variables: Variables,
    inputs: Inputs,
) -> Int[Array, "batch new"]:
    """The tokens of the highest logits, until every row has ended."""
    rows = jax.tree.leaves(inputs)[0].shape[0]
    # Causal attention hides later positions, so a buffer of the full length, with zeros
    # after the prefix, gives the prefix's logits with a single compilation.
    start = jnp.zeros((rows, new + 1), jnp.int32).at[:, 0].set(start_id)

    def unfinished(carry: Any) -> Array:
        i, done, _ = carry
        return (i < new) & ~jnp.all(done)

    def advance(carry: Any) -> Any:
        i, done, target = carry
        # The last token is an output only: the decoder never reads entry `new`.
        read = {**inputs, DECODER_INPUTS: target[:, :new]}
        logits = model.apply(variables, read).logits
        last = jax.lax.dynamic_index_in_dim(logits, i, axis=1, keepdims=False)
        token = jnp.argmax(last, axis=-1).astype(jnp.int32)
        # Rows that have ended go on with the others; `until_end` drops what follows.
        done = done | jnp.isin(token, jnp.asarray(ends, jnp.int32))
        return i + 1, done, target.at[:, i + 1].set(token)

    first = (jnp.int32(0), jnp.zeros(rows, bool), start)
    return jax.lax.while_loop(unfinished, advance, first)[2][:, 1:]
