"""Text generation with a causal language model, with a cache where it has one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from dew.nn.decoder import Decoder, read_cached
from dew.source import Source
from dew.typing import Model, Variables

Reader: TypeAlias = Callable[[Any, Array, Array], tuple[Array, Any]]
"""Reads new token number i: (memory, token [batch], i) to (logits, memory)."""


@runtime_checkable
class Selective(Protocol):
    """A model that says which inputs it has, as a lowered one does."""

    def takes(self, name: str) -> bool:
        """Whether the model has an input of this name."""
        ...


@dataclass(frozen=True, eq=False)
class TextGeneration:
    """A causal language model that continues prompts.

    A native decoder keeps a key-value cache; any other model evaluates the whole text
    again for every token. Texts of a batch are padded on the left.

    >>> import dew
    >>> source = dew.load(FOLDER)
    >>> task = TextGeneration(source, source.variables)
    >>> new = task.continue_tokens([[3, 5], [7]], max_new_tokens=4)
    >>> [len(row) <= 4 for row in new]
    [True, True]
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

        Temperature 0 takes the token of the highest logit; above it, tokens are drawn
        with `key`.

        Raises:
            ValueError: the source has no tokenizer, or an argument is out of range.
        """
        tokenizer = self.source.tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer; use continue_tokens")
        encoded = tokenizer.encode_batch(list(prompts), add_special_tokens=True)
        rows = self.continue_tokens(
            [e.ids for e in encoded],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            key=key,
        )
        return [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]

    def continue_tokens(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        key: Key[Array, ""] | None = None,
    ) -> list[list[int]]:
        """Returns the new token ids of each row, up to and with its end token.

        Raises:
            ValueError: a prompt is empty, or an argument is out of range.
        """
        _check(prompts, max_new_tokens, temperature, key)
        # Padding on the left puts the last token of every prompt in the last column, so
        # the next one goes to the same column of every row.
        width = max(len(row) for row in prompts)
        tokens = np.zeros((len(prompts), width), np.int32)
        mask = np.zeros(tokens.shape, bool)
        for i, row in enumerate(prompts):
            tokens[i, width - len(row) :] = row
            mask[i, width - len(row) :] = True
        new = generate_tokens(
            self.source.model,
            self.variables,
            jnp.asarray(tokens),
            jnp.asarray(mask),
            new_tokens=max_new_tokens,
            ends=self.source.eos_ids,
            temperature=jnp.float32(temperature) if temperature > 0 else None,
            key=key,
        )
        return [until_end(row, self.source.eos_ids) for row in np.asarray(new).tolist()]


def _check(
    prompts: Sequence[Sequence[int]],
    new: int,
    temperature: float,
    key: Key[Array, ""] | None,
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
    """The row up to and with its first end token; all of it without one."""
    stops = [i for i, token in enumerate(row) if token in ends]
    return row[: stops[0] + 1] if stops else row


@partial(jax.jit, static_argnames=("model", "new_tokens", "ends"))
def generate_tokens(
    model: Model,
    variables: Variables,
    tokens: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    *,
    new_tokens: int,
    ends: tuple[int, ...],
    temperature: Float[Array, ""] | None = None,
    key: Key[Array, ""] | None = None,
) -> Int[Array, "batch new"]:
    """The new tokens of prompts padded on the left, by greedy decoding or sampling.

    Without a temperature the token of the highest logit is taken; with one, tokens are
    drawn with `key`. Decoding stops once every row has ended: entries after a row's
    first token of `ends` are arbitrary.
    """
    if isinstance(model, Decoder):
        reader = _cached_reader(model, variables, tokens, mask, new_tokens)
    else:
        reader = _uncached_reader(model, variables, tokens, mask, new_tokens)
    read, memory, logits = reader

    def choose(logits: Array, i: Array) -> Array:
        if temperature is None or key is None:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # Keyed by the token's number: a draw does not depend on how many tokens follow,
        # so a longer continuation begins with the shorter one.
        draw = jax.random.fold_in(key, i)
        # From the highest logit down, and by a number that float32 has: a temperature
        # too small for either gives the most likely token, in the limit, and not NaN.
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        smallest = jnp.finfo(jnp.float32).tiny
        scaled = below / jnp.maximum(temperature, smallest)
        return jax.random.categorical(draw, scaled).astype(jnp.int32)

    def is_end(token: Array) -> Array:
        return jnp.isin(token, jnp.asarray(ends, jnp.int32))

    def unfinished(carry: Any) -> Array:
        i, done, *_ = carry
        return (i < new_tokens) & ~jnp.all(done)

    def advance(carry: Any) -> Any:
        i, done, out, memory = carry
        logits, memory = read(memory, out[:, i - 1], i - 1)
        token = choose(logits, i)
        return i + 1, done | is_end(token), out.at[:, i].set(token), memory

    # The pass over the prompt gives the first token, and the last one chosen is never
    # read: the memory needs `new_tokens - 1` slots beside the prompt's.
    first = choose(logits, jnp.int32(0))
    out = jnp.zeros((tokens.shape[0], new_tokens), jnp.int32).at[:, 0].set(first)
    start = (jnp.int32(1), is_end(first), out, memory)
    return jax.lax.while_loop(unfinished, advance, start)[2]


def _cached_reader(
    model: Decoder, variables: Variables, tokens: Array, mask: Array, new: int
) -> tuple[Reader, Any, Array]:
    """Reads the prompt into a key-value cache: reader, cache and last logits."""
    rows, width = tokens.shape
    dtype = model.dtype or variables["params"]["embed"]["weight"].dtype
    cache = model.empty_cache(rows, width + new - 1, dtype)
    # Slots of the cache count padding, positions do not: a prompt padded on the left
    # has the positions that it has alone. Padding gets 0, and is never attended to.
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    lengths = jnp.sum(mask, axis=1)
    inputs = {"tokens": tokens, "mask": mask, "positions": positions}
    logits, cache = read_cached(model, variables, cache, inputs)

    def read(cache: Any, token: Array, i: Array) -> tuple[Array, Any]:
        inputs = {"tokens": token[:, None], "positions": (lengths + i)[:, None]}
        logits, cache = read_cached(model, variables, cache, inputs)
        return logits[:, -1], cache

    return read, cache, logits[:, -1]


def _uncached_reader(
    model: Model, variables: Variables, tokens: Array, mask: Array, new: int
) -> tuple[Reader, Any, Array]:
    """Evaluates the whole text for every token, from a buffer of its full length."""
    width = tokens.shape[1]
    # One width from the start, so that the model is compiled once; the mask keeps the
    # slots that are not yet written out of every row's attention.
    pad = ((0, 0), (0, new - 1))
    text, real = jnp.pad(tokens, pad), jnp.pad(mask, pad)

    def score(text: Array, real: Array, last: int | Array) -> Array:
        positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
        inputs = {"tokens": text, "mask": real, "positions": positions}
        if isinstance(model, Selective):
            # Models without positions (ALiBi, state spaces) count by themselves.
            inputs = {name: x for name, x in inputs.items() if model.takes(name)}
        logits = model.apply(variables, inputs).logits
        return jax.lax.dynamic_index_in_dim(logits, last, axis=1, keepdims=False)

    def read(memory: Any, token: Array, i: Array) -> tuple[Array, Any]:
        text, real = memory
        text = text.at[:, width + i].set(token)
        real = real.at[:, width + i].set(True)
        return score(text, real, width + i), (text, real)

    return read, (text, real), score(text, real, width - 1)
