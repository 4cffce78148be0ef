"""Packed rows in torch modules: documents told apart by positions that restart."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dew.bridges.lowering.errors import LoweringError

SEGMENTS = "segment_ids"
_LEAK = 1e-3
"""Largest change, in standard deviations, of one document's output by another's tokens.
Rounding alone gives 1e-6; a leak gives about 1."""


def restarting(segment_ids: Array) -> Array:
    """Returns positions that count from 0 in each run of equal segment ids."""
    index = jax.lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def unpacked(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Says the segments in torch's way: by positions, and with no mask beside them.

    Transformers tells documents apart where positions restart, and only where no
    attention mask is given; padding is a segment like another.
    """
    rest = {k: v for k, v in inputs.items() if k not in (SEGMENTS, "mask")}
    given = rest.get("positions")
    segments = jnp.asarray(inputs[SEGMENTS])
    rest["positions"] = restarting(segments) if given is None else given
    return rest


def check_isolation(
    run: Callable[[dict[str, Any]], Array], vocab: int, owner: str
) -> None:
    """Holds a model to its promise: a document's output ignores the one before it.

    Two rows share their second document and differ in their first.

    Raises:
        LoweringError: the outputs of the second documents differ.
    """
    length = 8
    # Concrete even where the caller is being traced.
    with jax.ensure_compile_time_eval():
        key = jax.random.key(0)
        first = jax.random.randint(key, (2, length), 0, vocab)
        second = jax.random.randint(jax.random.fold_in(key, 1), (1, length), 0, vocab)
        tokens = jnp.concatenate([first, jnp.repeat(second, 2, axis=0)], axis=1)
        segments = jnp.repeat(jnp.array([[1], [2]]), length, axis=1).reshape(1, -1)
        segments = jnp.repeat(segments, 2, axis=0)
        out = run(unpacked({"tokens": tokens, SEGMENTS: segments}))[:, length:]
        moved = float(jnp.abs(out[0] - out[1]).max() / jnp.std(out))
    if not moved < _LEAK:
        raise LoweringError(
            f"{owner} does not keep packed documents apart: the tokens of one move the "
            f"outputs of the next by {moved:.1e} standard deviations; train it on rows "
            "of one document each, with a mask in place of segment_ids, which is "
            "packing='apart'"
        )
