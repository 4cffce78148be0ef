"""Entries behind masks, replaced before a model or a criterion reads them.

To select results afterwards is not enough: the gradient of what was not selected is
multiplied by zero, and 0 · NaN is NaN.
"""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from dew.source import Source

Tree = TypeVar("Tree")


def without_masked(inputs: Mapping[str, Array], *, pad_id: int = 0) -> dict[str, Array]:
    """A model's inputs with all entries behind masks replaced by ones that are valid.

    `mask` [batch, seq] and a segment of 0 cover what has their axes first, or after the
    batch's as in [batch, features, seq]; `pixel_mask` [batch, height, width] covers the
    pixels. Tokens become `pad_id`, all else 0. A decoder's inputs, whose names start
    with `decoder_`, have positions of their own and stay.
    """
    clean = dict(inputs)
    for name, leaf in inputs.items():
        is_pixels = name.startswith("pixel_")
        real = inputs.get("pixel_mask") if is_pixels else _real(inputs)
        if real is None or name.endswith("mask") or name.startswith("decoder_"):
            continue
        real = _along(real.astype(bool), leaf)
        if real is not None:
            fill = jnp.asarray(pad_id if name == "tokens" else 0, leaf.dtype)
            clean[name] = jnp.where(real, leaf, fill)
    return clean


def without_uncounted(rows: Tree, counted: Bool[Array, " batch"]) -> Tree:
    """Arrays in which rows that do not count are copies of the first row that does.

    A real row and not zeros, as statistics over a batch may be made of all of them.
    Without any row that counts, all become zero.
    """
    first = counted & (jnp.cumsum(counted) == 1)

    def replaced(leaf: Shaped[Array, "batch ..."]) -> Shaped[Array, "batch ..."]:
        column = (len(leaf), *[1] * (leaf.ndim - 1))
        # A sum with one term, because indexing by a number that is computed would
        # gather the whole of a batch that is split over devices.
        chosen = jnp.where(first.reshape(column), leaf, jnp.zeros((), leaf.dtype))
        row = jnp.sum(chosen, axis=0, keepdims=True).astype(leaf.dtype)
        return jnp.where(counted.reshape(column), leaf, row)

    return jax.tree.map(replaced, rows)


def padding_id(source: Source) -> int:
    """The id of a model's padding token by its config, or 0 without a valid one.

    Some models tell padding by its id, and count their positions by it.
    """
    config = source.config or {}
    text = config.get("text_config") or config
    stated = text.get("pad_token_id", config.get("pad_token_id"))
    rows = text.get("vocab_size")
    if isinstance(stated, int) and 0 <= stated < (rows or stated + 1):
        return stated
    return 0


def _real(inputs: Mapping[str, Array]) -> Array | None:
    """True for the real positions of a sequence, None where no mask is given."""
    real = [inputs["mask"].astype(bool)] if "mask" in inputs else []
    if "segment_ids" in inputs:
        real.append(inputs["segment_ids"] != 0)
    if not real:
        return None
    return real[0] if len(real) == 1 else real[0] & real[1]


def _along(mask: Array, leaf: Array) -> Array | None:
    """The mask with an axis for each of the leaf's, None where it covers none of it."""
    if leaf.shape[: mask.ndim] == mask.shape:
        return mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))
    if leaf.ndim > mask.ndim and (leaf.shape[0], *leaf.shape[2:]) == mask.shape:
        return mask[:, None]
    return None
