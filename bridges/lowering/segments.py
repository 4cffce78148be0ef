"""Packed rows in torch modules: positions restart at each document."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from dew.bridges.lowering.errors import LoweringError

SEGMENTS = "segment_ids"
_LEAK = 1e-3
"""Largest change, in standard deviations, of one document's output by another's tokens.
Rounding alone gives 1e-6; a leak gives about 1."""


def segment_positions(segment_ids: Array) -> Array:
    """Returns positions [batch, seq] that count from 0 in each run of equal ids."""
    index = jax.lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def segments_as_positions(inputs: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Replaces `segment_ids` by positions, and removes the mask.

    Transformers separates packed documents where positions restart, and only if there
    is no attention mask; padding is a segment like any other.
    """
    inputs_left = {k: v for k, v in inputs.items() if k not in (SEGMENTS, "mask")}
    positions = inputs_left.get("positions")
    segments = jnp.asarray(inputs[SEGMENTS])
    if positions is None:
        inputs_left["positions"] = segment_positions(segments)
    return inputs_left


def check_isolation(
    run: Callable[[dict[str, PyTree]], Array], vocab: int, owner: str
) -> None:
    """Checks that a document's outputs do not depend on the document before it.

    Two rows share their second document and differ in their first.

    Raises:
        LoweringError: the outputs of the second documents differ.
    """
    length = 8
    # Concrete even where the caller is being traced: the difference decides an error.
    with jax.ensure_compile_time_eval():
        key = jax.random.key(0)
        first = jax.random.randint(key, (2, length), 0, vocab)
        second = jax.random.randint(jax.random.fold_in(key, 1), (1, length), 0, vocab)
        tokens = jnp.concatenate([first, jnp.repeat(second, 2, axis=0)], axis=1)
        segments = jnp.repeat(jnp.array([[1], [2]]), length, axis=1).reshape(1, -1)
        segments = jnp.repeat(segments, 2, axis=0)
        out = run(segments_as_positions({"tokens": tokens, SEGMENTS: segments}))[
            :, length:
        ]
        moved = float(jnp.abs(out[0] - out[1]).max() / jnp.std(out))
    if not moved < _LEAK:
        raise LoweringError(
            f"{owner} does not keep packed documents apart: the tokens of one move the "
            f"outputs of the next by {moved:.1e} standard deviations; train it on rows "
            "of one document each, with a mask in place of segment_ids, which is "
            "packing='apart'"
        )
