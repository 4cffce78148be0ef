"""A causal transformer decoder, from token ids to logits."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dew.nn.attention import Context, SelfAttention, visible_keys
from dew.nn.config import DecoderConfig, MoE
from dew.nn.layers import RMSNorm
from dew.nn.mlp import GatedMLP
from dew.nn.moe import MixtureOfExperts
from dew.nn.stack import DecoderBank, StackView, scan_layers
from dew.typing import Outputs, Variables

Remat = Literal["none", "block", "dots"]
"""What the backward pass computes again: nothing, each block, all but its products."""

SOWN = ("qk", "routing")
"""Collections that a pass leaves something in where the caller opens them."""


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, train: bool
    ) -> Float[Array, "batch seq embed"]:
        """Adds what attention and the feed-forward layer say to the residual stream."""
        c = self.config
        attn = SelfAttention(c.attention, c.embed, init_std=c.init_std, name="attn")
        kind: Any = MixtureOfExperts if isinstance(c.mlp, MoE) else GatedMLP
        mlp = kind(c.mlp, c.embed, init_std=c.init_std, name="mlp")
        x = x + attn(
            RMSNorm(c.embed, c.norm_eps, name="attn_norm")(x), context, train=train
        )
        return x + mlp(RMSNorm(c.embed, c.norm_eps, name="mlp_norm")(x))


class Layers(nn.Module):
    """The stack of blocks, each under its own number."""

    config: DecoderConfig
    scan: bool = False
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        context: Context,
        *,
        train: bool,
        wanted: Sequence[int] = (),
    ) -> tuple[
        Float[Array, "batch seq embed"], dict[int, Float[Array, "batch seq embed"]]
    ]:
        """Returns the last block's output and those of the blocks in `wanted`."""
        if self.scan and not self.is_initializing():
            return self._scanned(x, context, train, wanted)
        outputs = {}
        for i in range(self.config.layers):
            x = self._block()(self.config, name=str(i))(x, context, train)
            if i in wanted:
                outputs[i] = x
        return x, outputs

    def _block(self) -> Any:
        """The block's class, rematerialised as asked."""
        if self.remat == "none":
            return Block
        policies = jax.checkpoint_policies
        policy = policies.dots_saveable if self.remat == "dots" else None
        return nn.remat(Block, policy=policy, static_argnums=(3,))

    def _scanned(
        self, x: Array, context: Context, train: bool, wanted: Sequence[int]
    ) -> tuple[Array, dict[int, Array]]:
        view = StackView(tuple(str(i) for i in range(self.config.layers)))
        bank = {name: view.stack(node) for name, node in self.variables.items()}
        writable = {*bank, *SOWN}
        open_for_writing = [c for c in writable if self.is_mutable_collection(c)]
        block = self._block()(self.config, parent=None)
        needs_key = train and self.has_rng("dropout")
        root = self.make_rng("dropout") if needs_key else jax.random.key(0)

        def run(variables: Any, key: Any, x: Any) -> tuple[Any, Any]:
            rngs = {"dropout": key} if needs_key else None
            return block.apply(
                variables, x, context, train, rngs=rngs, mutable=open_for_writing
            )

        keys = jax.random.split(root, self.config.layers)
        x, outputs, updates = scan_layers(run, x, bank, keys, wanted)
        for collection, updated in updates.items():
            for name, node in view.unstack(updated).items():
                self.put_variable(collection, name, node)
        return x, dict(zip(wanted, outputs, strict=True))


class Decoder(nn.Module):
    """Token ids to logits: embedding, blocks, final norm, output matrix.

    `dtype` is what it computes in, the embedding's own where None; norms' statistics,
    softmax and logits are float32 in any case. `scan` runs the blocks as one loop over
    their stacked weights: on a CPU unrolled blocks ran 1.8 times faster, on
    accelerators a scan saves compile time. Results and variables are the same.
    """

    config: DecoderConfig
    dtype: Any = None
    scan: bool = False
    remat: Remat = "none"

    def setup(self) -> None:
        """Declares the parts under the names of the canonical tree."""
        c = self.config
        init = nn.initializers.normal(c.init_std)
        self.embed = Table(c.vocab, c.embed, init)
        self.layers = Layers(c, scan=self.scan, remat=self.remat)
        self.norm = RMSNorm(c.embed, c.norm_eps)
        if not c.tied:
            self.head = Table(c.vocab, c.embed, init)

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
        table = self.embed() if self.config.tied else self.head()
        return jnp.einsum(
            "bse,ve->bsv",
            final,
            table.astype(final.dtype),
            preferred_element_type=jnp.float32,
        )

    def _trunk(
        self, inputs: Mapping[str, Array], *, train: bool, layers: Sequence[int]
    ) -> tuple[Array, tuple[Array, ...]]:
        wanted = [self._block_index(i) for i in layers]
        table = self.embed()
        x = jnp.take(table, inputs["tokens"], axis=0).astype(self.dtype or table.dtype)
        context = self._context(inputs)
        x, outputs = self.layers(
            x,
            context,
            train=train,
            wanted=sorted({i for i in wanted if i < self.config.layers}),
        )
        outputs[self.config.layers] = final = self.norm(x)
        return final, tuple(outputs[i] for i in wanted)

    def _block_index(self, i: int) -> int:
        n = self.config.layers
        if not -n <= i <= n:
            raise ValueError(f"layers must lie in [{-n}, {n}], got {i}")
        return i + n if i < 0 else i

    def _context(self, inputs: Mapping[str, Array]) -> Context:
        """What the blocks share: visibility and rotations, cached or not."""
        tokens = inputs["tokens"]
        rope = self.config.attention.rope
        if self.has_variable("cache", "length"):
            visible, positions, slot = self._cached_context(inputs)
            return Context(visible, rope.tables(positions), slot)
        positions = inputs.get("positions")
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = inputs.get("mask")
        visible = visible_keys(
            tokens.shape[1],
            mask=None if mask is None else mask.astype(bool),
            segments=inputs.get("segment_ids"),
        )
        return Context(visible, rope.tables(positions))

    def _cached_context(
        self, inputs: Mapping[str, Array]
    ) -> tuple[Array, Array, Array]:
        """Takes the next slots of the cache for the new tokens."""
        if "segment_ids" in inputs:
            raise ValueError("packed rows (segment_ids) cannot be read with a cache")
        tokens = inputs["tokens"]
        length = self.get_variable("cache", "length")
        known = self.get_variable("cache", "mask")
        new = inputs.get("mask")
        new = jnp.ones(tokens.shape, bool) if new is None else new.astype(bool)
        known = jax.lax.dynamic_update_slice(known, new, (0, length))
        self.put_variable("cache", "mask", known)
        self.put_variable("cache", "length", length + tokens.shape[1])
        slots = length + jnp.arange(tokens.shape[1])
        causal = jnp.arange(known.shape[1])[None, :] <= slots[:, None]
        positions = inputs.get("positions")
        if positions is None:
            positions = jnp.broadcast_to(slots, tokens.shape)
        return causal[None] & known[:, None, :], positions, length

    @nn.nowrap
    def empty_cache(self, batch: int, length: int, dtype: Any) -> dict[str, Any]:
        """A `cache` collection with room for `length` tokens of `batch` rows."""
        attention = self.config.attention
        shape = (batch, length, attention.kv_heads, attention.head_dim)
        slots = {name: jnp.zeros(shape, dtype) for name in ("k", "v")}
        return {
            "length": jnp.zeros((), jnp.int32),
            "mask": jnp.zeros((batch, length), bool),
            "layers": {str(i): {"attn": slots} for i in range(self.config.layers)},
        }

    @nn.nowrap
    def banks(self) -> tuple[DecoderBank, ...]:
        """The stacks that a scanned execution reads."""
        names = tuple(str(i) for i in range(self.config.layers))
        return (DecoderBank(("layers",), StackView(names)),) if self.scan else ()


class Table(nn.Module):
    """One row of `dim` numbers for each of `rows` tokens."""

    rows: int
    dim: int
    init: Any

    @nn.compact
    def __call__(self) -> Float[Array, "rows dim"]:
        """The whole table."""
        return self.param("weight", self.init, (self.rows, self.dim))


def read_cached(
    decoder: Decoder, variables: Variables, cache: Any, inputs: Mapping[str, Array]
) -> tuple[Float[Array, "batch seq vocab"], Any]:
    """Reads `inputs` after all that `cache` has seen; returns logits and new cache."""
    outputs, updated = decoder.apply(
        {**variables, "cache": cache}, inputs, mutable=["cache"]
    )
    return outputs.logits, updated["cache"]
