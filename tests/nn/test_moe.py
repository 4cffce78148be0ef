"""The mixture of experts against float64 numpy; what layers sow, by every execution."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.config import MLP, Attention, DecoderConfig, MoE
from dew.nn.decoder import Decoder, Remat
from dew.nn.moe import MixtureOfExperts
from dew.nn.rope import Rope
from tests.support.models import tiny_decoder
from tests.support.tolerances import ATOL, RTOL, assert_trees_close

CASES = {
    "softmax": MoE(experts=4, top_k=2, dim=5),
    "softmax, weights as they are": MoE(experts=4, top_k=3, dim=5, normalize=False),
    "sigmoid in groups, shared, balanced": MoE(
        experts=6,
        top_k=2,
        dim=5,
        scoring="sigmoid",
        scale=2.5,
        groups=3,
        top_groups=2,
        balanced=True,
        shared=MLP(dim=3),
    ),
    "softmax in groups by their best expert": MoE(
        experts=6,
        top_k=2,
        dim=5,
        normalize=False,
        groups=3,
        top_groups=1,
        group_top_k=1,
    ),
}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gated(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    return weights["down"] @ (silu(weights["gate"] @ x) * (weights["up"] @ x))


def matrices(node: Any, expert: Any = ...) -> dict[str, np.ndarray]:
    return {
        k: np.asarray(node[k]["weight"], np.float64)[expert]
        for k in ("gate", "up", "down")
    }


def mixed(x: np.ndarray, c: MoE, params: Any, bias: np.ndarray) -> np.ndarray:
    """One token by the definition: every expert in turn, float64."""
    logits = np.asarray(params["router"]["weight"], np.float64) @ x
    scores = 1 / (1 + np.exp(-logits))
    if c.scoring == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum()
    ranks = (scores + bias).reshape(c.groups, -1)
    best = np.sort(ranks, axis=1)[:, -c.group_top_k :].sum(axis=1)
    ranks[np.argsort(-best)[c.top_groups :]] = -np.inf
    chosen = np.argsort(-ranks.reshape(-1))[: c.top_k]
    weights = scores[chosen] / (scores[chosen].sum() if c.normalize else 1)
    parts = [gated(x, matrices(params["experts"], i)) for i in chosen]
    out = c.scale * (weights[:, None] * np.stack(parts)).sum(axis=0)
    return out + gated(x, matrices(params["shared"])) if c.shared else out


@pytest.mark.parametrize("c", CASES.values(), ids=CASES)
def test_a_mixture_is_the_weighted_sum_over_chosen_experts(c: MoE) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 7, 8))
    layer = MixtureOfExperts(c, 8, init_std=0.5)
    variables = jax.jit(layer.init)(jax.random.key(1), x)
    bias = np.zeros(c.experts)
    if c.balanced:
        bias = np.asarray(jax.random.normal(jax.random.key(2), (c.experts,)))
        variables = {**variables, "moe": {"router": {"bias": jnp.asarray(bias)}}}
    got = jax.jit(layer.apply)(variables, x)
    rows = np.asarray(x, np.float64).reshape(-1, 8)
    want = np.stack([mixed(row, c, variables["params"], bias) for row in rows])
    np.testing.assert_allclose(
        got, want.reshape(x.shape), rtol=RTOL["float32"], atol=ATOL["float32"]
    )


def decoder(scan: bool = False, remat: Remat = "none") -> Decoder:
    attention = Attention(heads=4, kv_heads=2, head_dim=4, rope=Rope(dim=4))
    config = DecoderConfig(
        vocab=11,
        embed=8,
        layers=2,
        attention=attention,
        mlp=CASES["sigmoid in groups, shared, balanced"],
        init_std=0.5,
    )
    return Decoder(config, scan=scan, remat=remat)


TOKENS = {"tokens": jnp.arange(10, dtype=jnp.int32).reshape(2, 5)}


def test_a_pass_sows_only_into_collections_that_are_open() -> None:
    model = decoder()
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    assert set(variables) == {"params", "moe"}
    _, updated = jax.eval_shape(partial(model.apply, mutable=["qk"]), variables, TOKENS)
    assert set(updated) == {"qk"}
    (maxima,) = updated["qk"]["layers"]["1"]["attn"]["max_logits"]
    assert (maxima.shape, maxima.dtype) == ((2, 4), jnp.float32)


@pytest.mark.full
def test_scanned_and_rematerialised_blocks_sow_the_same() -> None:
    variables = jax.jit(decoder().init)(jax.random.key(0), TOKENS)

    def sown(scan: bool, remat: Remat) -> Any:
        model = decoder(scan=scan, remat=remat)

        def loss(params: Any) -> Any:
            tree = {**variables, "params": params}
            out, seen = model.apply(tree, TOKENS, mutable=["qk", "routing"])
            return jnp.sum(jnp.sin(out.logits)), seen

        return jax.jit(jax.grad(loss, has_aux=True))(variables["params"])

    first = sown(False, "none")
    rest = sown(False, "block"), sown(True, "block")
    assert set(first[1]) == {"qk", "routing"}
    for other in rest:
        assert_trees_close(other, first, rtol=RTOL["reordered"], atol=ATOL["float32"])


def test_the_maxima_are_those_of_the_visible_scores() -> None:
    model = tiny_decoder()
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    single = {"tokens": TOKENS["tokens"][:, :1]}
    _, updated = jax.jit(partial(model.apply, mutable=["qk"]))(variables, single)
    layer = jax.tree.map(np.float64, variables["params"])["layers"]["0"]
    table = np.asarray(variables["params"]["embed"]["weight"], np.float64)
    x = table[single["tokens"][:, 0]]
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + model.config.norm.eps)
    # A first token sees itself alone and is not turned: its score is q · k / sqrt(dim).
    q = np.einsum("hde,be->bhd", layer["attn"]["q"]["weight"], x)
    k = np.einsum("kde,be->bkd", layer["attn"]["k"]["weight"], x)
    want = np.einsum("bhd,bkd->bh", q, k) / 2
    (got,) = updated["qk"]["layers"]["0"]["attn"]["max_logits"]
    np.testing.assert_allclose(
        got, want, rtol=RTOL["reordered"], atol=ATOL["small float32"]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 5}, r"top_k must be in \[1, 4\], got 5"),
        ({"groups": 3}, "groups must divide 4, got 3"),
        ({"top_groups": 2}, r"top_groups must be in \[1, 1\], got 2"),
        ({"groups": 2, "top_k": 3}, r"at most the 1 open groups' 2 experts, got 3"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CASES["softmax"], **change)
