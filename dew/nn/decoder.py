"""Causal transformer decoder with a key/value cache, from token ids to logits."""

from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dew.nn.attention import Context, visible_keys
from dew.nn.block import BlockStack, DecoderBank, Remat, stack_view
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

NO_HEAD = (
    "the model is a trunk without a language-model head, so it has no logits: load a "
    "model with one (architectures: [...ForCausalLM]), or train its hidden states"
)
"""Message of a model that is asked for logits and has none."""


class Decoder(nn.Module):
    """Causal transformer: embedding, blocks, final norm and language-model head.

    `dtype` is the precision of the forward pass, by default that of the embedding;
    statistics of norms, softmax and logits are float32 in any case. `scan` runs the
    blocks as one loop over their stacked weights where all are built alike: on a CPU
    unrolled blocks ran 1.8 times faster, on accelerators a scan saves compile time.
    Results and variables are the same. Where positions are learned, a text longer than
    their table is an error; `positions` given to a compiled call cannot be checked, and
    give NaN past the table.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from dew.nn import MLP, Attention, DecoderConfig, Rope
    >>> attention = Attention(heads=4, kv_heads=2, head_dim=8, rope=Rope(dim=8))
    >>> config = DecoderConfig(
    ...     vocab=97, embed=32, layers=2, attention=attention, mlp=MLP(dim=64)
    ... )
    >>> decoder, inputs = Decoder(config), {"tokens": jnp.ones((1, 5), jnp.int32)}
    >>> variables = decoder.init(jax.random.key(0), inputs)
    >>> outputs = decoder.apply(variables, inputs, layers=(0,))
    >>> outputs.logits.shape, outputs.hidden[0].shape
    ((1, 5, 97), (1, 5, 32))
    """

    config: DecoderConfig
    dtype: DTypeLike | None = None
    scan: bool = False
    remat: Remat = "none"

    def setup(self) -> None:
        """Declares the submodules; attribute names are the names in checkpoints."""
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
        if c.head is not None:
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
        """Returns logits, final hidden states, and the outputs of blocks `layers`.

        The logits of a model without a head are None.
        """
        final, hidden = self._trunk(inputs, train=train, layers=layers)
        logits = None if self.config.head is None else self.unembed(final)
        return Outputs(logits=logits, final=final, hidden=hidden)

    def hidden(
        self,
        inputs: Mapping[str, Array],
        *,
        train: bool = False,
        layers: Sequence[int] = (),
    ) -> Float[Array, "batch seq embed"]:
        """Returns the final hidden states [batch, seq, embed], without logits."""
        return self._trunk(inputs, train=train, layers=layers)[0]

    def unembed(
        self, final: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of final hidden states, float32.

        Raises:
            ValueError: the model has no head.
        """
        c = self.config
        if c.head is None:
            raise ValueError(NO_HEAD)
        final = final if c.embedding_width is None else self.narrow(final)
        logits = self.head(final, self.embed() if c.head.tied else None)
        # The logits are cut and not the table, whose rows stay evenly sharded.
        return logits[..., : c.vocab] if c.extra_rows else logits

    def _trunk(
        self, inputs: Mapping[str, Array], *, train: bool, layers: Sequence[int]
    ) -> tuple[Array, tuple[Array, ...]]:
        indices = [self._block_index(i) for i in layers]
        context, positions = self._context(inputs)
        x = self._embed(inputs["tokens"], positions)
        x, outputs = self.layers(
            x,
            context,
            train=train,
            outputs=sorted({i for i in indices if i < self.config.layers}),
        )
        final = x if self.config.residual.norms == "sum" else self.norm(x)
        outputs[self.config.layers] = final
        return final, tuple(outputs[i] for i in indices)

    def _embed(
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
        """Returns masks and rotary tables of the blocks, and every token's position."""
        tokens = inputs["tokens"]
        seq = tokens.shape[1]
        if self.has_variable("cache", "length"):
            mask, slot = self._extend_cache(inputs)
            # Slots and not positions decide what is later: with left padding, or
            # stated positions, a row's positions are not its slots in the cache.
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
        """Returns every token's position: as given, or as counted within its row."""
        c, tokens = self.config.embedding, inputs["tokens"]
        if "positions" in inputs:
            check_positions(c, inputs["positions"])
            return inputs["positions"]
        if not c.positions_from_mask or mask is None:
            if not self.has_variable("cache", "length"):
                check_length(c, tokens.shape[1])
            return jnp.broadcast_to(slots, tokens.shape)
        # Padding itself has position -1, as in transformers.
        real = mask.astype(jnp.int32)
        counts = jnp.cumsum(real, axis=1) * real - 1
        counts = jnp.take(counts, slots, axis=1)
        check_positions(c, counts)
        return counts

    def _extend_cache(
        self, inputs: Mapping[str, Array]
    ) -> tuple[Bool[Array, "batch keys"], Int[Array, ""]]:
        """Appends new tokens to the cache's mask.

        Returns:
            The mask of all slots, true for tokens that are not padding, and the slot of
            the first new token.
        """
        if "segment_ids" in inputs:
            raise ValueError("packed rows (segment_ids) cannot be read with a cache")
        tokens = inputs["tokens"]
        length = self.get_variable("cache", "length")
        mask = self.get_variable("cache", "mask")
        self._check_room(length, tokens.shape[1], mask.shape[1])
        new = inputs.get("mask")
        new = jnp.ones(tokens.shape, bool) if new is None else new.astype(bool)
        # Slots have one length for all rows and a fixed number, so that every step of a
        # generation has the shapes of one compiled program; free slots are masked.
        mask = jax.lax.dynamic_update_slice(mask, new, (0, length))
        self.put_variable("cache", "mask", mask)
        self.put_variable("cache", "length", length + tokens.shape[1])
        return mask, length

    def _check_room(self, length: Int[Array, ""], new: int, slots: int) -> None:
        """Raises ValueError for tokens without a slot, where the length is concrete."""
        # Past the end dynamic_update_slice would overwrite the last slots. A compiled
        # call has no length to check, but still fewer tokens than slots.
        used = 0 if isinstance(length, Tracer) else int(length)
        if used + new > slots:
            raise ValueError(
                f"a cache of {slots} tokens that holds {used} cannot take {new} more; "
                "make a longer one with empty_cache"
            )

    @nn.nowrap
    def empty_cache(self, batch: int, length: int, dtype: DTypeLike) -> Variables:
        """Returns a `cache` collection for `length` tokens of each of `batch` rows.

        Raises:
            ValueError: the table of learned positions has fewer rows than `length`.
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
        """Returns the scanned stacks; empty where blocks are unrolled."""
        if not (self.scan and self.config.is_uniform):
            return ()
        return (DecoderBank(("layers",), stack_view(self.config)),)


def read_cached(
    decoder: Decoder,
    variables: Variables,
    cache: Variables,
    inputs: Mapping[str, Array],
) -> tuple[Float[Array, "batch seq vocab"], Variables]:
    """Runs the decoder on `inputs` after the cached tokens.

    Returns:
        Logits of the new tokens, and the cache with the new tokens appended.
    """
    outputs, updated = decoder.apply(
        {**variables, "cache": cache}, inputs, mutable=["cache"]
    )
    return outputs.logits, updated["cache"]
