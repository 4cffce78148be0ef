"""Bidirectional transformer encoder, from token ids to the outputs of its head."""

from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dew.nn.attention import Context, visible_keys
from dew.nn.block import BlockStack, DecoderBank, Remat, StackView
from dew.nn.config import EncoderConfig
from dew.nn.embedding import TokenEmbedding, check_length, check_positions, learned_rows
from dew.nn.encoder_head import EncoderHead
from dew.nn.linear import Linear
from dew.nn.norm import Normalization
from dew.typing import Outputs

KINDS = "token_type_ids"
"""Input with the type of every token (sentence A or B), by torch's name."""


class Encoder(nn.Module):
    """Bidirectional transformer: embedding, blocks, final norm and the config's head.

    Besides the inputs of every model there may be `token_type_ids`, by default 0.
    `positions` count from 0 in every family. `dtype`, `scan` and `remat` are as for a
    `Decoder`; blocks that share weights are never scanned.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from dew.nn import MLP, Attention, EncoderConfig, Head, HeadConfig
    >>> config = EncoderConfig(
    ...     vocab=97,
    ...     embed=32,
    ...     layers=2,
    ...     attention=Attention(heads=4, kv_heads=4, head_dim=8),
    ...     mlp=MLP(dim=64),
    ...     readout=HeadConfig(head=Head(tied=True)),
    ... )
    >>> encoder, inputs = Encoder(config), {"tokens": jnp.ones((1, 5), jnp.int32)}
    >>> variables = encoder.init(jax.random.key(0), inputs)
    >>> encoder.apply(variables, inputs).logits.shape
    (1, 5, 97)
    """

    config: EncoderConfig
    dtype: DTypeLike | None = None
    scan: bool = False
    remat: Remat = "none"

    def setup(self) -> None:
        """Declares the submodules; attribute names are the names in checkpoints."""
        c = self.config
        init = nn.initializers.normal(c.init_std)
        width = c.embed if c.embedding_width is None else c.embedding_width
        self.embed = TokenEmbedding(c.vocab, width, init)
        if c.types:
            self.types = TokenEmbedding(c.types, width, init)
        if c.embedding.positions:
            rows = c.embedding.positions + c.embedding.offset
            self.positions = TokenEmbedding(rows, width, init)
        if c.embedding.norm is not None:
            self.embed_norm = Normalization(c.embedding.norm, (width,))
        if c.embedding_width is not None:
            self.widen = Linear((width,), (c.embed,), bias=True, init_std=c.init_std)
        self.layers = BlockStack(c, scan=self.scan, remat=self.remat)
        if c.residual.norms != "sum":
            self.norm = Normalization(c.norm, (c.embed,))
        self.head = EncoderHead(c)

    def __call__(
        self,
        inputs: Mapping[str, Array],
        *,
        train: bool = False,
        layers: Sequence[int] = (),
    ) -> Outputs:
        """Returns the head's outputs, final hidden states, and those of `layers`."""
        final, hidden = self._trunk(inputs, train=train, layers=layers)
        logits, pooled = self._head_outputs(final, inputs.get("mask"))
        return Outputs(logits=logits, final=final, hidden=hidden, pooled=pooled)

    def hidden(
        self,
        inputs: Mapping[str, Array],
        *,
        train: bool = False,
        layers: Sequence[int] = (),
    ) -> Float[Array, "batch seq embed"]:
        """Returns the final hidden states [batch, seq, embed], without the head."""
        return self._trunk(inputs, train=train, layers=layers)[0]

    def unembed(self, final: Float[Array, "batch seq embed"]) -> Array | None:
        """Returns the logits of final hidden states, float32.

        Raises:
            ValueError: the head has no logits over the vocabulary.
        """
        if self.config.readout.head is None:
            raise ValueError(
                "unembed needs a readout over the vocabulary, as of a masked language "
                "model; this encoder has none"
            )
        return self._head_outputs(final, None)[0]

    def _head_outputs(
        self, final: Array, mask: Array | None
    ) -> tuple[Array | None, Array | None]:
        head = self.config.readout.head
        is_tied = head is not None and head.tied
        return self.head(final, mask, self.embed() if is_tied else None)

    def _trunk(
        self, inputs: Mapping[str, Array], *, train: bool, layers: Sequence[int]
    ) -> tuple[Array, tuple[Array, ...]]:
        n = self.config.layers
        faults = [i for i in layers if not -n <= i <= n]
        if faults:
            raise ValueError(f"layers must lie in [{-n}, {n}], got {faults[0]}")
        indices = [i + n if i < 0 else i for i in layers]
        positions = self._positions(inputs)
        x, outputs = self.layers(
            self._embed(inputs, positions),
            self._context(inputs, positions),
            train=train,
            outputs=sorted({i for i in indices if i < n}),
        )
        outputs[n] = final = x if self.config.residual.norms == "sum" else self.norm(x)
        return final, tuple(outputs[i] for i in indices)

    def _embed(
        self, inputs: Mapping[str, Array], positions: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq embed"]:
        c, table, tokens = self.config, self.embed(), inputs["tokens"]
        x = jnp.take(table, tokens, axis=0).astype(self.dtype or table.dtype)
        if c.types:
            kinds = inputs.get(KINDS, jnp.zeros_like(tokens))
            x = x + jnp.take(self.types(), kinds, axis=0).astype(x.dtype)
        if c.embedding.positions:
            rows = positions + c.embedding.offset
            x = x + learned_rows(self.positions(), rows).astype(x.dtype)
        if c.embedding.norm is not None:
            x = self.embed_norm(x)
        return x if c.embedding_width is None else self.widen(x)

    def _positions(self, inputs: Mapping[str, Array]) -> Int[Array, "batch seq"]:
        """Returns every token's position; -1 for padding with a known token id."""
        c, tokens = self.config, inputs["tokens"]
        if "positions" not in inputs and c.padding is None:
            check_length(c.embedding, tokens.shape[1])
            return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        positions = inputs.get("positions")
        if positions is None:
            real = (tokens != c.padding).astype(jnp.int32)
            positions = jnp.cumsum(real, axis=1) * real - 1
        check_positions(c.embedding, positions)
        return positions

    def _context(
        self, inputs: Mapping[str, Array], positions: Int[Array, "batch seq"]
    ) -> Context:
        seq = inputs["tokens"].shape[1]
        mask = inputs.get("mask")
        visible = visible_keys(
            seq,
            causal=False,
            mask=None if mask is None else mask.astype(bool),
            segments=inputs.get("segment_ids"),
        )
        slots = jnp.arange(seq)
        c = self.config.attention
        # Both tables for all blocks: local and global layers alternate, and each takes
        # its own by `Attention.is_local`, and narrows the one mask to its own window.
        rotations = (
            c.rope.tables(positions) if c.rope else None,
            c.local_rope.tables(positions) if c.local_rope else None,
        )
        # Absolute distances make a window symmetric: as many keys ahead as behind.
        return Context(visible, jnp.abs(slots[:, None] - slots[None, :]), rotations)

    @nn.nowrap
    def banks(self) -> tuple[DecoderBank, ...]:
        """Returns the scanned stacks; empty where blocks are unrolled."""
        names = tuple(str(i) for i in range(self.config.layers))
        is_scanned = self.scan and self.config.is_uniform
        return (DecoderBank(("layers",), StackView(names)),) if is_scanned else ()
