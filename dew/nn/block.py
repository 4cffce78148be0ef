"""Transformer block, and the stack of blocks, unrolled or scanned."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from dew.nn.attention import Context, SelfAttention
from dew.nn.config import MoE, TransformerConfig
from dew.nn.mlp import FeedForward
from dew.nn.moe import MixtureOfExperts
from dew.nn.norm import Normalization
from dew.typing import Path, Variables

Remat = Literal["none", "block", "dots"]
"""Recomputed in the backward pass: nothing, blocks, or all but matrix products."""

SOWN = ("qk", "routing", "router", "maps")
"""Collections that blocks write to where the caller makes them mutable."""


class Block(nn.Module):
    """Transformer block: x + attention(norm x), then x + mlp(norm x).

    The config's `residual` moves the norms, or runs both parts in parallel.
    """

    config: TransformerConfig
    layer: int = 0

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, train: bool
    ) -> Float[Array, "batch seq embed"]:
        """Returns the residual stream after attention and the feed-forward layer."""
        c, std = self.config, self.config.init_std
        residual, mlp = c.residual, c.mlp_of(self.layer)
        attn = SelfAttention(
            c.attention, c.embed, init_std=std, layer=self.layer, name="attn"
        )
        attend = partial(attn, context=context, train=train)
        feed = (
            MixtureOfExperts(mlp, c.embed, init_std=std, name="mlp")
            if isinstance(mlp, MoE)
            else FeedForward(mlp, c.embed, init_std=std, name="mlp")
        )
        if residual.norms == "sum":
            x = self._norm(x + self._scale(attend(x)), "attn")
            return self._norm(x + self._scale(feed(x)), "mlp")
        if not residual.parallel:
            x = x + self._after(attend(self._before(x, "attn")), "attn")
            return x + self._after(feed(self._before(x, "mlp")), "mlp")
        attn_input = self._before(x, "attn")
        mlp_input = attn_input if residual.shared else self._before(x, "mlp")
        update = self._after(attend(attn_input), "attn")
        return x + (update + self._after(feed(mlp_input), "mlp"))

    def _before(self, x: Array, part: str) -> Array:
        c = self.config
        has_no_norm = part == "attn" and not c.has_attn_norm(self.layer)
        return x if c.residual.norms == "after" or has_no_norm else self._norm(x, part)

    def _after(self, x: Array, part: str) -> Array:
        if self.config.residual.norms != "before":
            x = self._norm(x, f"{part}_post")
        return self._scale(x)

    def _norm(self, x: Array, part: str) -> Array:
        c = self.config
        return Normalization(c.norm, (c.embed,), name=f"{part}_norm")(x)

    def _scale(self, x: Array) -> Array:
        scale = self.config.residual.scale
        return x if scale == 1 else x * scale


class BlockStack(nn.Module):
    """Stack of blocks, each named by the index under which its weights are stored."""

    config: TransformerConfig
    scan: bool = False
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        context: Context,
        *,
        train: bool,
        outputs: Sequence[int] = (),
    ) -> tuple[
        Float[Array, "batch seq embed"], dict[int, Float[Array, "batch seq embed"]]
    ]:
        """Returns the last output, and by index those of the blocks `outputs`."""
        is_scanned = self.scan and self.config.is_uniform
        if is_scanned and not self.is_initializing():
            return self._scan(x, context, train, outputs)
        states, blocks = {}, {}
        for i in range(self.config.layers):
            stored = self.config.stored_index(i)
            if stored not in blocks:
                blocks[stored] = self._block()(self.config, stored, name=str(stored))
            x = blocks[stored](x, context, train)
            if i in outputs:
                states[i] = x
        return x, states

    def _block(self) -> type[Block]:
        """Returns the block class, wrapped for rematerialisation if set."""
        if self.remat == "none":
            return Block
        policies = jax.checkpoint_policies
        policy = policies.dots_saveable if self.remat == "dots" else None
        return nn.remat(Block, policy=policy, static_argnums=(3,))

    def _scan(
        self, x: Array, context: Context, train: bool, outputs: Sequence[int]
    ) -> tuple[Array, dict[int, Array]]:
        # Weights are stored one block at a time, as a checkpoint has them, and stacked
        # within the compiled step: the variables of both executions are the same.
        view = stack_view(self.config)
        bank = {name: view.stack(node) for name, node in self.variables.items()}
        writable = {*bank, *SOWN}
        open_for_writing = [c for c in writable if self.is_mutable_collection(c)]
        block = self._block()(self.config, 0, parent=None)
        needs_key = train and self.has_rng("dropout")
        root = self.make_rng("dropout") if needs_key else jax.random.key(0)

        def run(variables: Variables, key: Array, x: Array) -> tuple[Array, Variables]:
            rngs = {"dropout": key} if needs_key else None
            return block.apply(
                variables, x, context, train, rngs=rngs, mutable=open_for_writing
            )

        keys = jax.random.split(root, self.config.layers)
        x, states, updates = scan_layers(run, x, bank, keys, outputs)
        for collection, updated in updates.items():
            for name, node in view.unstack(updated).items():
                self.put_variable(collection, name, node)
        return x, dict(zip(outputs, states, strict=True))


@dataclass(frozen=True)
class StackView:
    """Stacking of a node's subtrees `names` into one bank, and its inverse."""

    names: tuple[str, ...]

    def stack(self, node: Mapping[str, PyTree]) -> PyTree:
        """Returns one subtree whose leaves are all layers', stacked on axis 0."""
        layers = [node[name] for name in self.names]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

    def unstack(self, bank: PyTree) -> dict[str, PyTree]:
        """Returns one subtree per layer, by name."""
        return {
            name: jax.tree.map(lambda leaf, i=i: leaf[i], bank)
            for i, name in enumerate(self.names)
        }


def stack_view(config: TransformerConfig) -> StackView:
    """Returns the view by which a scan stacks all blocks of a config."""
    return StackView(tuple(str(i) for i in range(config.layers)))


@dataclass(frozen=True)
class DecoderBank:
    """Blocks of a scanned stack: their path below each collection, and their view."""

    namespace: Path
    view: StackView


@runtime_checkable
class Scanned(Protocol):
    """A model that declares the stacks which it scans."""

    def banks(self) -> tuple[DecoderBank, ...]:
        """Returns the scanned stacks; empty where blocks are unrolled.

        Whether a stack is scanned is a field of the model, `scan`.
        """
        ...


def scan_layers(
    block: Callable[[PyTree, Array, Array], tuple[Array, PyTree]],
    x: Float[Array, "batch seq embed"],
    bank: PyTree,
    keys: Array,
    outputs: Sequence[int],
) -> tuple[
    Float[Array, "batch seq embed"], list[Float[Array, "batch seq embed"]], PyTree
]:
    """Runs `block(variables, key, x) -> (x, updates)` over a bank of layers.

    Returns:
        The last output, the outputs of the layers `outputs`, and the updates stacked.
    """

    def step(
        x: Array, layer: tuple[PyTree, Array]
    ) -> tuple[Array, tuple[Array | None, PyTree]]:
        variables, key = layer
        x, updates = block(variables, key, x)
        # A scan stacks every layer's output: none are kept where none are needed.
        return x, (x if outputs else None, updates)

    x, (states, updates) = jax.lax.scan(step, x, (bank, keys))
    return x, [] if states is None else [states[i] for i in outputs], updates
