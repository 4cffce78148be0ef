"""Writing the target of what an encoder has read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dew.tasks.generation import until_end
from dew.tasks.scoring import Scoring
from dew.typing import Model, Variables

DECODER_INPUTS = "decoder_input_ids"
"""What the decoder reads, by torch's name."""


@dataclass(frozen=True, eq=False)
class TargetGeneration(Scoring):
    """An encoder-decoder that writes the target of each source, from `start_id` on.

    It always writes the likeliest token. Source and target are read anew for every
    token: there is no cache.
    """

    start_id: int

    def generate(self, sources: Sequence[str], *, max_new_tokens: int) -> list[str]:
        """Returns the target of each source text."""
        tokenizer = self.source.tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer; use write")
        rows = [e.ids for e in tokenizer.encode_batch(list(sources))]
        inputs = padded(rows)
        new = self.write(inputs, max_new_tokens=max_new_tokens)
        return [tokenizer.decode(ids, skip_special_tokens=True) for ids in new]

    def write(
        self, inputs: Mapping[str, Any], *, max_new_tokens: int
    ) -> list[list[int]]:
        """Returns target ids of each row of what the encoder reads, by name.

        They go up to and with the first end token; `start_id` is left out.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
        model, ends = self.source.model, self.source.eos_ids
        new = _written(
            model, max_new_tokens, self.start_id, ends, self.variables, dict(inputs)
        )
        return [until_end(row, ends) for row in np.asarray(new).tolist()]


def padded(rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Rows of ids as `tokens` [batch, seq], filled up with 0 on the right, and `mask`.

    Raises:
        ValueError: there is no row, or none has a token.
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
def _written(
    model: Model,
    new: int,
    start: int,
    ends: tuple[int, ...],
    variables: Variables,
    inputs: Mapping[str, Any],
) -> Int[Array, "batch new"]:
    """The likeliest tokens, until every row has ended."""
    rows = jax.tree.leaves(inputs)[0].shape[0]
    # What stands after a token is hidden from it, so the buffer may be whole at once.
    begun = jnp.zeros((rows, new + 1), jnp.int32).at[:, 0].set(start)

    def unfinished(carry: Any) -> Array:
        i, done, _ = carry
        return (i < new) & ~jnp.all(done)

    def advance(carry: Any) -> Any:
        i, done, written = carry
        read = {**inputs, DECODER_INPUTS: written[:, :new]}
        logits = model.apply(variables, read).logits
        said = jax.lax.dynamic_index_in_dim(logits, i, axis=1, keepdims=False)
        token = jnp.argmax(said, axis=-1).astype(jnp.int32)
        done = done | jnp.isin(token, jnp.asarray(ends, jnp.int32))
        return i + 1, done, written.at[:, i + 1].set(token)

    first = (jnp.int32(0), jnp.zeros(rows, bool), begun)
    return jax.lax.while_loop(unfinished, advance, first)[2][:, 1:]
