"""Top-k mixture of experts with ragged matrix products.

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

# Rows [tokens, in] times weights [experts, out, in], each run of rows by its expert's.
RAGGED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


class MixtureOfExperts(nn.Module):
    """Weighted sum of the selected experts' outputs, plus that of the shared expert.

    Shazeer et al., "Outrageously Large Neural Networks" (2017), with the choices of
    DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1.2. Where the
    collection `routing` is mutable, it receives `chosen` [batch, seq, top_k] as a
    one-tuple: the indices of the experts selected for each token.
    """

    config: MoE
    embed: int
    init_std: float = 0.02

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq embed"]:
        """Returns the layer's output at every position, independent of the others."""
        c = self.config
        weights, chosen = Router(c, self.embed, self.init_std, name="router")(x)
        if self.is_mutable_collection("routing") and not self.is_initializing():
            self.put_variable("routing", "chosen", (chosen,))
        # Every token appears top_k times, once for each of its experts, sorted so that
        # an expert's tokens are consecutive: shapes depend on the number of tokens
        # alone, however unevenly they are routed. Stable, so that equal routings give
        # equal sums.
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=c.experts).astype(jnp.int32)
        rows = rearrange(x, "b s e -> (b s) e")[order // c.top_k]
        out = Experts(c, self.embed, self.init_std, name="experts")(rows, sizes)
        # A gather by the inverse permutation: on accelerators a scatter-add would sum
        # in an order of its own.
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
        shared_output = shared(x)
        if c.shared_gate:
            gate = Linear((self.embed,), (1,), init_std=self.init_std, name="open")
            shared_output = shared_output * nn.sigmoid(gate(x))
        return mixed + shared_output


class Router(nn.Module):
    """Router: the `top_k` experts of each token and their weights, in float32.

    The bias of a balanced router is in the collection `moe` and not in `params`: it has
    no gradient, and changes the selection but not the weights. If the collection
    `router` is mutable, it receives `logits` [batch, seq, experts] as a one-tuple.
    """

    config: MoE
    embed: int
    init_std: float = 0.02

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> tuple[Float[Array, "batch seq top_k"], Int[Array, "batch seq top_k"]]:
        """Returns the selected experts' weights and indices, highest score first."""
        c = self.config
        init = nn.initializers.normal(self.init_std)
        weight = self.param("weight", init, (c.experts, self.embed))
        # In float32 in every dtype: rounded logits would tie, and a tie that breaks
        # another way than in the reference sends a token to another expert.
        logits = jnp.einsum(
            "bse,ne->bsn", x.astype(jnp.float32), weight.astype(jnp.float32)
        )
        if c.router_bias:
            bias = self.param("bias", nn.initializers.zeros, (c.experts,))
            logits = logits + bias.astype(jnp.float32)[None, None]
        if self.is_mutable_collection("router") and not self.is_initializing():
            self.put_variable("router", "logits", (logits,))
        score = jax.nn.sigmoid if c.scoring == "sigmoid" else jax.nn.softmax
        scores = score(logits)
        # The selection has no gradient; the router learns through the weights alone.
        ranks = jax.lax.stop_gradient(scores)
        if c.balanced:
            bias = self.variable("moe", "bias", jnp.zeros, (c.experts,)).value
            ranks = ranks + bias.astype(jnp.float32)[None, None]
        _, chosen = jax.lax.top_k(self._mask_groups(ranks), c.top_k)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if c.normalize:
            # The addend prevents NaN where all sigmoids underflow to 0.
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * c.scale, chosen

    def _mask_groups(
        self, ranks: Float[Array, "batch seq experts"]
    ) -> Float[Array, "batch seq experts"]:
        """Returns ranks with -inf for the experts of groups that are not selected."""
        c = self.config
        if c.groups == c.top_groups:
            return ranks
        grouped = rearrange(ranks, "b s (g n) -> b s g n", g=c.groups)
        best, _ = jax.lax.top_k(grouped, min(c.group_top_k, c.experts // c.groups))
        _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), c.top_groups)
        selected = jnp.any(jax.nn.one_hot(groups, c.groups, dtype=bool), axis=-2)
        return jnp.where(selected[..., None], grouped, -jnp.inf).reshape(ranks.shape)


class Experts(nn.Module):
    """Gated MLPs of all experts; weights are stacked as in torch, outputs first."""

    config: MoE
    embed: int
    init_std: float = 0.02

    @nn.compact
    def __call__(
        self, rows: Float[Array, "rows embed"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows embed"]:
        """Returns the experts' outputs for rows sorted by expert, `sizes` rows each."""
        c = self.config

        def product(name: str, x: Array, outputs: int) -> Array:
            shape = (c.experts, outputs, x.shape[-1])
            weight = ExpertWeight(shape, self.init_std, name=name)().astype(x.dtype)
            y = jax.lax.ragged_dot_general(x, weight, sizes, RAGGED)
            if not c.bias:
                return y
            shape = (c.experts, outputs)
            bias = self.param(f"{name}_bias", nn.initializers.zeros, shape)
            # A static length: the sum of sizes is the number of rows in any routing.
            expert = jnp.repeat(
                jnp.arange(c.experts), sizes, total_repeat_length=rows.shape[0]
            )
            return y + bias.astype(y.dtype)[expert]

        gate, up = (product(name, rows, c.dim) for name in ("gate", "up"))
        return product("down", gate_output(gate, up, c), self.embed)


def gate_output(
    gate: Float[Array, "rows mlp"], up: Float[Array, "rows mlp"], config: MoE
) -> Float[Array, "rows mlp"]:
    """Returns the hidden layer of experts: act(gate) · up, or the clamped form."""
    if config.clamp is None:
        return ACTIVATIONS[config.activation](gate) * up
    alpha, limit = config.clamp.alpha, config.clamp.limit
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * nn.sigmoid(alpha * gate)


class ExpertWeight(nn.Module):
    """Weight with one matrix per expert, [experts, out, in]."""

    shape: tuple[int, int, int]
    init_std: float

    @nn.compact
    def __call__(self) -> Float[Array, "experts out in"]:
        """Returns the matrices of all experts."""
        return self.param("weight", nn.initializers.normal(self.init_std), self.shape)


def expert_loads(
    moe: Variables, routing: Variables, real: Bool[Array, "batch seq"]
) -> dict[str, Any]:
    """Returns the number of real tokens routed to each expert, at its bias's path.

    `moe` and `routing` are collections: the counts at …/router/bias are those of the
    indices at …/chosen.
    """
    chosen = flatten(routing)
    loads = {}
    for path, bias in flatten(moe).items():
        # What a module sows is a tuple; a router sows once a pass.
        sown = (*path[:-2], "chosen")
        (experts,) = (leaf for at, leaf in chosen.items() if at[:-1] == sown)
        picks = jax.nn.one_hot(experts, bias.shape[0], dtype=jnp.float32)
        loads[path] = jnp.einsum("bske,bs->e", picks, real.astype(jnp.float32))
    return unflatten(loads)
