"""A mixture of experts: which MLPs a token reads, and the sum of what they say.

No token is dropped: tokens are sorted by expert, and each expert's run of them is one
group of a ragged product, so work grows with `top_k` and not with `experts`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MoE
from dew.nn.linear import Linear
from dew.nn.mlp import FeedForward
from dew.tree import flatten, unflatten
from dew.typing import Variables

# Rows [tokens, in] by weights [experts, out, in]: each run of rows by its own expert.
RAGGED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


class MixtureOfExperts(nn.Module):
    """Σ weight · expert(x) over the chosen experts, and the shared one's output.

    Shazeer et al., "Outrageously Large Neural Networks" (2017), with the choices of
    DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1.2. Where the
    collection `routing` is open, `chosen` [batch, seq, top_k] is left in it as a
    one-tuple: the experts that each token read.
    """

    config: MoE
    embed: int
    init_std: float = 0.02

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq embed"]:
        """Transforms each position by itself."""
        c = self.config
        weights, chosen = Router(c, self.embed, self.init_std, name="router")(x)
        if self.is_mutable_collection("routing") and not self.is_initializing():
            self.put_variable("routing", "chosen", (chosen,))
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=c.experts).astype(jnp.int32)
        rows = rearrange(x, "b s e -> (b s) e")[order // c.top_k]
        out = Experts(c, self.embed, self.init_std, name="experts")(rows, sizes)
        out = out[jnp.argsort(order)].reshape(*chosen.shape, self.embed)
        mixed = jnp.einsum(
            "bske,bsk->bse",
            out,
            weights.astype(x.dtype),
            preferred_element_type=jnp.float32,
        ).astype(x.dtype)
        if c.shared is None:
            return mixed
        shared = FeedForward(
            c.shared, self.embed, init_std=self.init_std, name="shared"
        )
        said = shared(x)
        if c.shared_gate:
            gate = Linear((self.embed,), (1,), init_std=self.init_std, name="open")
            said = said * nn.sigmoid(gate(x))
        return mixed + said


class Router(nn.Module):
    """The `top_k` experts of each token and their weights, worked out in float32.

    The bias of a balanced router lies in the collection `moe` and not in `params`: no
    gradient reaches it, and it moves the choice but not the weights.
    """

    config: MoE
    embed: int
    init_std: float = 0.02

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> tuple[Float[Array, "batch seq top_k"], Int[Array, "batch seq top_k"]]:
        """Weights and indices, the best expert first."""
        c = self.config
        init = nn.initializers.normal(self.init_std)
        weight = self.param("weight", init, (c.experts, self.embed))
        logits = jnp.einsum(
            "bse,ne->bsn", x.astype(jnp.float32), weight.astype(jnp.float32)
        )
        if c.router_bias:
            bias = self.param("bias", nn.initializers.zeros, (c.experts,))
            logits = logits + bias.astype(jnp.float32)[None, None]
        score = jax.nn.sigmoid if c.scoring == "sigmoid" else jax.nn.softmax
        scores = score(logits)
        ranks = jax.lax.stop_gradient(scores)
        if c.balanced:
            bias = self.variable("moe", "bias", jnp.zeros, (c.experts,)).value
            ranks = ranks + bias.astype(jnp.float32)[None, None]
        _, chosen = jax.lax.top_k(self._open(ranks), c.top_k)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if c.normalize:
            # The least addend keeps sigmoids that all underflow from giving NaN.
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * c.scale, chosen

    def _open(
        self, ranks: Float[Array, "batch seq experts"]
    ) -> Float[Array, "batch seq experts"]:
        """The ranks with those of closed groups at -inf."""
        c = self.config
        if c.groups == c.top_groups:
            return ranks
        grouped = rearrange(ranks, "b s (g n) -> b s g n", g=c.groups)
        best, _ = jax.lax.top_k(grouped, min(c.group_top_k, c.experts // c.groups))
        _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), c.top_groups)
        is_open = jnp.any(jax.nn.one_hot(kept, c.groups, dtype=bool), axis=-2)
        return jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(ranks.shape)


class Experts(nn.Module):
    """Gated MLPs side by side; weights are stacked as torch has them, outputs first."""

    config: MoE
    embed: int
    init_std: float = 0.02

    @nn.compact
    def __call__(
        self, rows: Float[Array, "rows embed"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows embed"]:
        """Transforms rows sorted by expert, of which each expert has `sizes`."""
        c = self.config

        def product(name: str, x: Array, outputs: int) -> Array:
            shape = (c.experts, outputs, x.shape[-1])
            weight = ExpertWeight(shape, self.init_std, name=name)().astype(x.dtype)
            y = jax.lax.ragged_dot_general(x, weight, sizes, RAGGED)
            if not c.bias:
                return y
            shape = (c.experts, outputs)
            bias = self.param(f"{name}_bias", nn.initializers.zeros, shape)
            owner = jnp.repeat(
                jnp.arange(c.experts), sizes, total_repeat_length=rows.shape[0]
            )
            return y + bias.astype(y.dtype)[owner]

        gate, up = (product(name, rows, c.dim) for name in ("gate", "up"))
        return product("down", gated(gate, up, c), self.embed)


def gated(
    gate: Float[Array, "rows mlp"], up: Float[Array, "rows mlp"], config: MoE
) -> Float[Array, "rows mlp"]:
    """What an expert's gate lets through."""
    if config.clamp is None:
        return ACTIVATIONS[config.activation](gate) * up
    alpha, limit = config.clamp.alpha, config.clamp.limit
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * nn.sigmoid(alpha * gate)


class ExpertWeight(nn.Module):
    """One matrix per expert, [experts, out, in]."""

    shape: tuple[int, int, int]
    init_std: float

    @nn.compact
    def __call__(self) -> Float[Array, "experts out in"]:
        """All of them."""
        return self.param("weight", nn.initializers.normal(self.init_std), self.shape)


def expert_loads(
    moe: Variables, routing: Variables, real: Bool[Array, "batch seq"]
) -> dict[str, Any]:
    """How many real tokens each expert read, in the place of its router's bias.

    `moe` and `routing` are the collections: …/router/bias counts what …/chosen names.
    """
    chosen = flatten(routing)
    loads = {}
    for path, bias in flatten(moe).items():
        (experts,) = chosen[(*path[:-2], "chosen")]
        picks = jax.nn.one_hot(experts, bias.shape[0], dtype=jnp.float32)
        loads[path] = jnp.einsum("bske,bs->e", picks, real.astype(jnp.float32))
    return unflatten(loads)
