"""Continuing a text with a causal language model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from dew.nn.decoder import Decoder, read_cached
from dew.source import Source
from dew.typing import Model, Variables


@dataclass(frozen=True, eq=False)
class TextGeneration:
    """A causal language model that continues prompts.

    A native decoder keeps a cache; any other model reads the whole text again for every
    token. Texts of a batch are padded on the left.
    """

    source: Source
    variables: Variables

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        key: Key[Array, ""] | None = None,
    ) -> list[str]:
        """Returns the continuation of each prompt, without the prompt.

        Temperature 0 takes the likeliest token; above it, tokens are drawn with `key`.
        """
        tokenizer = self.source.tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer; use continue_tokens")
        encoded = tokenizer.encode_batch(list(prompts), add_special_tokens=True)
        continued = self.continue_tokens(
            [e.ids for e in encoded],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            key=key,
        )
        return [tokenizer.decode(ids, skip_special_tokens=True) for ids in continued]

    def continue_tokens(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        key: Key[Array, ""] | None = None,
    ) -> list[list[int]]:
        """Returns the new token ids of each row, up to and with its end token."""
        _check(prompts, max_new_tokens, temperature, key)
        width = max(len(row) for row in prompts)
        tokens = np.zeros((len(prompts), width), np.int32)
        mask = np.zeros(tokens.shape, bool)
        for i, row in enumerate(prompts):
            tokens[i, width - len(row) :] = row
            mask[i, width - len(row) :] = True
        new = continued(
            self.source.model,
            max_new_tokens,
            temperature > 0,
            self.source.eos_ids,
            self.variables,
            jnp.asarray(tokens),
            jnp.asarray(mask),
            jnp.float32(temperature or 1.0),
            jax.random.key(0) if key is None else key,
        )
        return [until_end(row, self.source.eos_ids) for row in np.asarray(new).tolist()]


def _check(
    prompts: Sequence[Sequence[int]], new: int, temperature: float, key: Any
) -> None:
    faults = []
    if not prompts or any(not row for row in prompts):
        faults.append("every prompt needs at least one token")
    if new < 1:
        faults.append(f"max_new_tokens must be >= 1, got {new}")
    if temperature < 0:
        faults.append(f"temperature must be >= 0, got {temperature}")
    if temperature > 0 and key is None:
        faults.append("a temperature above 0 needs a key to draw with")
    if faults:
        raise ValueError("; ".join(faults))


def until_end(row: list[int], ends: tuple[int, ...]) -> list[int]:
    """The row up to and with its first end token."""
    stops = [i for i, token in enumerate(row) if token in ends]
    return row[: stops[0] + 1] if stops else row


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def continued(
    model: Model,
    new: int,
    sample: bool,
    ends: tuple[int, ...],
    variables: Variables,
    tokens: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    temperature: Float[Array, ""],
    key: Key[Array, ""],
) -> Int[Array, "batch new"]:
    """The new tokens of prompts padded on the left, drawn with `key` where `sample`.

    Stops early once every row has ended; what stands after a row's first end token is
    no part of it.
    """
    if isinstance(model, Decoder):
        read, memory, logits = _cached(model, variables, tokens, mask, new)
    else:
        read, memory, logits = _uncached(model, variables, tokens, mask, new)

    def choose(logits: Array, i: Array) -> Array:
        if not sample:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
        return drawn.astype(jnp.int32)

    def is_end(token: Array) -> Array:
        return jnp.isin(token, jnp.asarray(ends, jnp.int32))

    def unfinished(carry: Any) -> Array:
        i, done, *_ = carry
        return (i < new) & ~jnp.all(done)

    def advance(carry: Any) -> Any:
        i, done, out, memory = carry
        logits, memory = read(memory, out[:, i - 1], i - 1)
        token = choose(logits, i)
        return i + 1, done | is_end(token), out.at[:, i].set(token), memory

    # The last token chosen is never read: it needs no slot and no position.
    first = choose(logits, jnp.int32(0))
    out = jnp.zeros((tokens.shape[0], new), jnp.int32).at[:, 0].set(first)
    start = (jnp.int32(1), is_end(first), out, memory)
    return jax.lax.while_loop(unfinished, advance, start)[2]


def _cached(
    model: Decoder, variables: Variables, tokens: Array, mask: Array, new: int
) -> tuple[Any, Any, Array]:
    """Reads the prompt into a cache; later tokens are read one at a time."""
    rows, width = tokens.shape
    dtype = model.dtype or variables["params"]["embed"]["weight"].dtype
    cache = model.empty_cache(rows, width + new - 1, dtype)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    lengths = jnp.sum(mask, axis=1)
    inputs = {"tokens": tokens, "mask": mask, "positions": positions}
    logits, cache = read_cached(model, variables, cache, inputs)

    def read(cache: Any, token: Array, i: Array) -> tuple[Array, Any]:
        inputs = {"tokens": token[:, None], "positions": (lengths + i)[:, None]}
        logits, cache = read_cached(model, variables, cache, inputs)
        return logits[:, -1], cache

    return read, cache, logits[:, -1]


def _uncached(
    model: Model, variables: Variables, tokens: Array, mask: Array, new: int
) -> tuple[Any, Any, Array]:
    """Keeps the whole text in a buffer that is read anew for every token."""
    width = tokens.shape[1]
    pad = ((0, 0), (0, new - 1))
    text, known = jnp.pad(tokens, pad), jnp.pad(mask, pad)

    def score(text: Array, known: Array, last: Any) -> Array:
        positions = jnp.maximum(jnp.cumsum(known, axis=1) - 1, 0)
        inputs = {"tokens": text, "mask": known, "positions": positions}
        logits = model.apply(variables, inputs).logits
        return jax.lax.dynamic_index_in_dim(logits, last, axis=1, keepdims=False)

    def read(memory: Any, token: Array, i: Array) -> tuple[Array, Any]:
        text, known = memory
        text = text.at[:, width + i].set(token)
        known = known.at[:, width + i].set(True)
        return score(text, known, width + i), (text, known)

    return read, (text, known), score(text, known, width - 1)
