"""The block of a transformer, and the stack of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dew.nn.attention import Context, SelfAttention
from dew.nn.config import MoE, TransformerConfig
from dew.nn.mlp import FeedForward
from dew.nn.moe import MixtureOfExperts
from dew.nn.norm import Normalization
from dew.typing import Path

Remat = Literal["none", "block", "dots"]
"""What the backward pass computes again: nothing, each block, all but its products."""

SOWN = ("qk", "routing", "maps")
"""Collections that a pass leaves something in where the caller opens them."""


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x), with norms where the config says."""

    config: TransformerConfig
    layer: int = 0

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, train: bool
    ) -> Float[Array, "batch seq embed"]:
        """Adds what attention and the feed-forward layer say to the residual stream."""
        c, std = self.config, self.config.init_std
        residual, mlp = c.residual, c.mlp_of(self.layer)
        kind: Any = MixtureOfExperts if isinstance(mlp, MoE) else FeedForward
        attn = SelfAttention(
            c.attention, c.embed, init_std=std, layer=self.layer, name="attn"
        )
        attend = partial(attn, context=context, train=train)
        feed = kind(mlp, c.embed, init_std=std, name="mlp")
        if residual.norms == "sum":
            x = self._norm(x + self._scaled(attend(x)), "attn")
            return self._norm(x + self._scaled(feed(x)), "mlp")
        if not residual.parallel:
            x = x + self._after(attend(self._before(x, "attn")), "attn")
            return x + self._after(feed(self._before(x, "mlp")), "mlp")
        seen = self._before(x, "attn")
        fed = seen if residual.shared else self._before(x, "mlp")
        said = self._after(attend(seen), "attn") + self._after(feed(fed), "mlp")
        return x + said

    def _before(self, x: Array, part: str) -> Array:
        c = self.config
        is_bare = part == "attn" and not c.has_attn_norm(self.layer)
        return x if c.residual.norms == "after" or is_bare else self._norm(x, part)

    def _after(self, x: Array, part: str) -> Array:
        if self.config.residual.norms != "before":
            x = self._norm(x, f"{part}_post")
        return self._scaled(x)

    def _norm(self, x: Array, part: str) -> Array:
        c = self.config
        return Normalization(c.norm, (c.embed,), name=f"{part}_norm")(x)

    def _scaled(self, x: Array) -> Array:
        scale = self.config.residual.scale
        return x if scale == 1 else x * scale


class BlockStack(nn.Module):
    """The stack of blocks, each under the number its weights are stored by."""

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
        wanted: Sequence[int] = (),
    ) -> tuple[
        Float[Array, "batch seq embed"], dict[int, Float[Array, "batch seq embed"]]
    ]:
        """Returns the last block's output and those of the blocks in `wanted`."""
        is_scanned = self.scan and self.config.is_uniform
        if is_scanned and not self.is_initializing():
            return self._scanned(x, context, train, wanted)
        outputs, blocks = {}, {}
        for i in range(self.config.layers):
            stored = self.config.stored(i)
            if stored not in blocks:
                blocks[stored] = self._block()(self.config, stored, name=str(stored))
            x = blocks[stored](x, context, train)
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
        block = self._block()(self.config, 0, parent=None)
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


@dataclass(frozen=True)
class StackView:
    """How the subtrees `names` of one node become a bank, and come back from it."""

    names: tuple[str, ...]

    def stack(self, node: Mapping[str, Any]) -> Any:
        """The layers' leaves stacked on axis 0, in the order of `names`."""
        layers = [node[name] for name in self.names]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

    def unstack(self, bank: Any) -> dict[str, Any]:
        """One subtree per layer again."""
        return {
            name: jax.tree.map(lambda leaf, i=i: leaf[i], bank)
            for i, name in enumerate(self.names)
        }


@dataclass(frozen=True)
class DecoderBank:
    """A physical scanned stack: where it lies below each collection, and its view."""

    namespace: Path
    view: StackView


@runtime_checkable
class Scanned(Protocol):
    """A model that says which stacks a scanned execution of it reads."""

    def banks(self) -> tuple[DecoderBank, ...]:
        """The stacks, none where blocks are unrolled."""
        ...


def scan_layers(
    block: Callable[[Any, Any, Any], tuple[Any, Any]],
    x: Float[Array, "batch seq embed"],
    bank: Any,
    keys: Any,
    wanted: Sequence[int],
) -> tuple[Float[Array, "batch seq embed"], list[Any], Any]:
    """Runs `block(variables, key, x) -> (x, updates)` over a bank.

    Returns:
        The last output, the outputs of the layers in `wanted`, and the updates stacked.
    """

    def step(x: Any, layer: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
        variables, key = layer
        x, updates = block(variables, key, x)
        return x, (x if wanted else None, updates)

    x, (outputs, updates) = jax.lax.scan(step, x, (bank, keys))
    return x, [outputs[i] for i in wanted], updates
