"""A causal transformer decoder, from token ids to logits."""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from dew.nn.attention import Context, visible_keys
from dew.nn.block import BlockStack, DecoderBank, Remat, StackView
from dew.nn.config import DecoderConfig
from dew.nn.embedding import (
    TokenEmbedding,
    Unembedding,
    check_length,
    check_positions,
    learned_rows,
)
from dew.nn.linear import Linear
from dew.nn.norm import Normalization
from dew.typing import Outputs, Variables


class Decoder(nn.Module):
    """Token ids to logits: embedding, blocks, final norm, output matrix.

    `dtype` is what it computes in, the embedding's own where None; norms' statistics,
    softmax and logits are float32 in any case. `scan` runs the blocks as one loop over
    their stacked weights where all are built alike: on a CPU unrolled blocks ran 1.8
    times faster, on accelerators a scan saves compile time. Results and variables are
    the same. Where positions are learned, a text longer than their table is an error;
    `positions` stated to a compiled call are not looked at, and make NaN past it.
    """

    config: DecoderConfig
    dtype: Any = None
    scan: bool = False
    remat: Remat = "none"

    def setup(self) -> None:
        """Declares the parts under the names of the canonical tree."""
        c = self.config
        init = nn.initializers.normal(c.init_std)
        width = c.embed if c.embedding_width is None else c.embedding_width
        self.embed = TokenEmbedding(c.rows, width, init)
        if c.embedding_width is not None:
            self.widen = Linear((width,), (c.embed,), init_std=c.init_std)
            self.narrow = Linear((c.embed,), (width,), init_std=c.init_std)
        self.layers = BlockStack(c, scan=self.scan, remat=self.remat)
        if c.residual.norms != "sum":
            self.norm = Normalization(c.norm, (c.embed,))
        self.head = Unembedding(c.head, c.rows, width, init)
        if c.embedding.positions:
            rows = c.embedding.positions + c.embedding.offset
            self.positions = TokenEmbedding(rows, c.embed, init)
        if c.embedding.norm is not None:
            self.embed_norm = Normalization(c.embedding.norm, (c.embed,))

    def __call__(
        self,
        inputs: Mapping[str, Array],
        *,
        train: bool = False,
        layers: Sequence[int] = (),
    ) -> Outputs:
        """Logits, the final hidden states, and the outputs of the blocks asked for."""
        final, hidden = self._trunk(inputs, train=train, layers=layers)
        return Outputs(logits=self.unembed(final), final=final, hidden=hidden)

    def hidden(
        self,
        inputs: Mapping[str, Array],
        *,
        train: bool = False,
        layers: Sequence[int] = (),
    ) -> Float[Array, "batch seq embed"]:
        """The final hidden states alone."""
        return self._trunk(inputs, train=train, layers=layers)[0]

    def unembed(
        self, final: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq vocab"]:
        """Scores of every token of the vocabulary, float32."""
        c = self.config
        final = final if c.embedding_width is None else self.narrow(final)
        logits = self.head(final, self.embed() if c.head.tied else None)
        # Cut from the logits and not from the table, whose rows stay split evenly.
        return logits[..., : c.vocab] if c.extra_rows else logits

    def _trunk(
        self, inputs: Mapping[str, Array], *, train: bool, layers: Sequence[int]
    ) -> tuple[Array, tuple[Array, ...]]:
        wanted = [self._block_index(i) for i in layers]
        context, positions = self._context(inputs)
        x = self._embedded(inputs["tokens"], positions)
        x, outputs = self.layers(
            x,
            context,
            train=train,
            wanted=sorted({i for i in wanted if i < self.config.layers}),
        )
        final = x if self.config.residual.norms == "sum" else self.norm(x)
        outputs[self.config.layers] = final
        return final, tuple(outputs[i] for i in wanted)

    def _embedded(
        self, tokens: Int[Array, "batch seq"], positions: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq embed"]:
        c, table = self.config.embedding, self.embed()
        x = jnp.take(table, tokens, axis=0).astype(self.dtype or table.dtype)
        if c.scale != 1:
            x = x * jnp.asarray(c.scale, x.dtype)
        x = x if self.config.embedding_width is None else self.widen(x)
        if c.positions:
            rows = learned_rows(self.positions(), positions + c.offset)
            x = x + rows.astype(x.dtype)
        return x if c.norm is None else self.embed_norm(x)

    def _block_index(self, i: int) -> int:
        n = self.config.layers
        if not -n <= i <= n:
            raise ValueError(f"layers must lie in [{-n}, {n}], got {i}")
        return i + n if i < 0 else i

    def _context(
        self, inputs: Mapping[str, Array]
    ) -> tuple[Context, Int[Array, "batch seq"]]:
        """What the blocks share, cached or not, and the position of every token."""
        tokens = inputs["tokens"]
        seq = tokens.shape[1]
        if self.has_variable("cache", "length"):
            mask, slot = self._cached(inputs)
            slots = slot + jnp.arange(seq)
            keys = jnp.arange(mask.shape[1])
            visible = (keys[None, :] <= slots[:, None])[None] & mask[:, None, :]
        else:
            slot, mask = None, inputs.get("mask")
            mask = None if mask is None else mask.astype(bool)
            keys = slots = jnp.arange(seq)
            visible = visible_keys(
                seq, causal=True, mask=mask, segments=inputs.get("segment_ids")
            )
        positions = self._positions(inputs, slots, mask)
        c = self.config.attention
        rotations = (
            c.rope.tables(positions) if c.rope else None,
            c.local_rope.tables(positions) if c.local_rope else None,
        )
        distance = slots[:, None] - keys[None, :]
        return Context(visible, distance, rotations, slot), positions

    def _positions(
        self,
        inputs: Mapping[str, Array],
        slots: Int[Array, " seq"],
        mask: Bool[Array, "batch keys"] | None,
    ) -> Int[Array, "batch seq"]:
        """Where every token stands: as stated, or counted in the row it lies in."""
        c, tokens = self.config.embedding, inputs["tokens"]
        if "positions" in inputs:
            check_positions(c, inputs["positions"])
            return inputs["positions"]
        if not c.positions_from_mask or mask is None:
            if not self.has_variable("cache", "length"):
                check_length(c, tokens.shape[1])
            return jnp.broadcast_to(slots, tokens.shape)
        # Padding itself counts as -1, as in transformers.
        real = mask.astype(jnp.int32)
        counts = jnp.cumsum(real, axis=1) * real - 1
        counts = jnp.take(counts, slots, axis=1)
        check_positions(c, counts)
        return counts

    def _cached(self, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
        """Takes the next slots of the cache; returns which are no padding, and where.

        The first of the new tokens stands at the slot returned.
        """
        if "segment_ids" in inputs:
            raise ValueError("packed rows (segment_ids) cannot be read with a cache")
        tokens = inputs["tokens"]
        length = self.get_variable("cache", "length")
        known = self.get_variable("cache", "mask")
        self._check_room(length, tokens.shape[1], known.shape[1])
        new = inputs.get("mask")
        new = jnp.ones(tokens.shape, bool) if new is None else new.astype(bool)
        known = jax.lax.dynamic_update_slice(known, new, (0, length))
        self.put_variable("cache", "mask", known)
        self.put_variable("cache", "length", length + tokens.shape[1])
        return known, length

    def _check_room(self, length: Int[Array, ""], new: int, slots: int) -> None:
        """Refuses tokens that the cache has no slot for, where its length is known."""
        taken = 0 if isinstance(length, Tracer) else int(length)
        if taken + new > slots:
            raise ValueError(
                f"a cache of {slots} tokens that holds {taken} cannot take {new} more; "
                "make a longer one with empty_cache"
            )

    @nn.nowrap
    def empty_cache(self, batch: int, length: int, dtype: Any) -> dict[str, Any]:
        """A `cache` collection with room for `length` tokens of `batch` rows.

        Raises:
            ValueError: the table of learned positions is shorter.
        """
        check_length(self.config.embedding, length)
        c = self.config.attention
        sizes = {"k": c.head_dim, "v": c.value_dim}
        slots = {
            name: jnp.zeros((batch, length, c.kv_heads, size), dtype)
            for name, size in sizes.items()
        }
        return {
            "length": jnp.zeros((), jnp.int32),
            "mask": jnp.zeros((batch, length), bool),
            "layers": {str(i): {"attn": slots} for i in range(self.config.layers)},
        }

    @nn.nowrap
    def banks(self) -> tuple[DecoderBank, ...]:
        """The stacks that a scanned execution reads."""
        names = tuple(str(i) for i in range(self.config.layers))
        is_scanned = self.scan and self.config.is_uniform
        return (DecoderBank(("layers",), StackView(names)),) if is_scanned else ()


def read_cached(
    decoder: Decoder, variables: Variables, cache: Any, inputs: Mapping[str, Array]
) -> tuple[Float[Array, "batch seq vocab"], Any]:
    """Reads `inputs` after all that `cache` has seen; returns logits and new cache."""
    outputs, updated = decoder.apply(
        {**variables, "cache": cache}, inputs, mutable=["cache"]
    )
    return outputs.logits, updated["cache"]
