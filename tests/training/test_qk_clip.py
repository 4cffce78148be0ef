"""QK-Clip on a layer small enough to compute all its logits in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dew.training import optimizers
from dew.training.qk_clip import qk_clip
from dew.tree import flatten, select, unflatten
from tests.support.tolerances import OPTIMIZER, RTOL

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 3, 6
X = np.random.default_rng(9).normal(size=(5, 8, WIDTH))


def attention(kv_heads: int, seed: int = 0) -> dict[str, Any]:
    """Draws one attention layer's query and key maps under the names of ours."""
    draw = np.random.default_rng(seed)
    layer = {
        name: {
            "weight": jnp.asarray(draw.normal(size=(heads, DIM, WIDTH)), jnp.float32),
            "bias": jnp.asarray(draw.normal(size=(heads, DIM)), jnp.float32),
        }
        for name, heads in (("q", HEADS), ("k", kv_heads))
    }
    return {"params": {"layers": {"0": {"attn": layer}}}}


def logits(params: Any) -> np.ndarray:
    """Computes all logits in float64: [rows, heads, queries, keys]."""
    layer = params["params"]["layers"]["0"]["attn"]
    maps = {name: jax.tree.map(np.float64, layer[name]) for name in ("q", "k")}
    q, k = (
        np.einsum("hde,bse->bshd", maps[n]["weight"], X) + maps[n]["bias"] for n in "qk"
    )
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return np.einsum("bshd,bthd->bhst", q, k)


def maxima(params: Any) -> dict[str, Any]:
    largest = jnp.asarray(logits(params).max(axis=(2, 3)), jnp.float32)
    return {"layers": {"0": {"attn": {"max_logits": (largest,)}}}}


def clipped(params: Any, stats: Any, **settings: Any) -> Any:
    transform = qk_clip(**settings)
    zeros = jax.tree.map(jnp.zeros_like, params)
    update = jax.jit(transform.update)
    updates, _ = update(zeros, transform.init(params), params, qk_stats=stats)
    return optax.apply_updates(params, updates)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_qk_clip_brings_every_head_to_the_threshold(alpha: float) -> None:
    params = attention(HEADS)
    before = logits(params).max(axis=(0, 2, 3))
    tau = float(np.median(before))
    after = logits(clipped(params, maxima(params), tau=tau, alpha=alpha))
    np.testing.assert_allclose(
        after.max(axis=(0, 2, 3)), np.minimum(before, tau), rtol=OPTIMIZER
    )


def test_qk_clip_of_shared_keys_takes_the_strictest_gamma_of_the_group() -> None:
    params = attention(KV_HEADS)
    before = logits(params).max(axis=(0, 2, 3))
    tau = float(np.sort(before)[2])
    gamma = np.minimum(1, tau / before)
    strictest = np.repeat(gamma.reshape(2, 2).min(axis=1), 2)
    after = logits(clipped(params, maxima(params), tau=tau, alpha=0.25))
    want = before * gamma**0.25 * strictest**0.75
    np.testing.assert_allclose(after.max(axis=(0, 2, 3)), want, rtol=OPTIMIZER)
    assert np.all(want <= tau * (1 + OPTIMIZER))


def test_qk_clip_leaves_quiet_heads_their_exact_update() -> None:
    params, steps = attention(HEADS), attention(HEADS, seed=1)
    transform = qk_clip(1e6)
    updates, _ = transform.update(
        steps, transform.init(params), params, qk_stats=maxima(params)
    )
    same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), updates, steps)
    assert all(jax.tree.leaves(same))


def test_qk_clip_follows_the_update_it_is_chained_to() -> None:
    params, stats = attention(HEADS), maxima(attention(HEADS))
    plain = optimizers.adamw(0.1, clip_norm=None)
    grads = attention(HEADS, seed=2)
    moved = {}
    for name, optimizer in {"plain": plain, "clip": plain.then(qk_clip(1.0))}.items():
        transform = optimizer.transform
        updates, _ = transform.update(
            grads, transform.init(params), params, qk_stats=stats
        )
        moved[name] = optax.apply_updates(params, updates)
    want = clipped(moved["plain"], stats, tau=1.0)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=OPTIMIZER),
        moved["clip"],
        want,
    )


def test_qk_clip_treats_latent_attention_by_its_nope_rows() -> None:
    params = attention(HEADS)
    stats = maxima(params)
    stats["layers"]["0"]["attn"]["qk_nope"] = (jnp.int32(2),)
    tau = float(np.median(logits(params).max(axis=(0, 2, 3))))
    gamma = np.minimum(1, tau / logits(params).max(axis=(0, 2, 3)))[:, None]
    new = clipped(params, stats, tau=tau)["params"]["layers"]["0"]["attn"]
    old = params["params"]["layers"]["0"]["attn"]
    ratio = {name: np.asarray(new[name]["bias"] / old[name]["bias"]) for name in "qk"}
    want_q = np.concatenate([gamma**0.5, gamma**0.5, gamma], axis=1)
    want_k = np.concatenate([gamma**0.5, gamma**0.5, gamma**0], axis=1)
    np.testing.assert_allclose(ratio["q"], want_q, rtol=RTOL["float32"])
    np.testing.assert_allclose(ratio["k"], want_k, rtol=RTOL["float32"])


def test_qk_clip_steps_aside_without_statistics() -> None:
    params = attention(HEADS)
    assert qk_clip(1.0).update(params, optax.EmptyState(), params)[0] is params


def without(params: Any, name: str) -> Any:
    return select(params, lambda path: path[-2] != name)


def with_norm(params: Any) -> Any:
    layer = params["params"]["layers"]["0"]["attn"]
    return unflatten(
        flatten(params)
        | {("params", "layers", "0", "attn", "q_norm", "weight"): layer["q"]["bias"][0]}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: without(params, "k"), "layers/0/attn trains q alone"),
        (with_norm, "layers/0/attn has q_norm, which undo"),
        (lambda params: {"params": {"embed": jnp.ones(2)}}, "q and k under none"),
    ],
)
def test_qk_clip_refuses_layers_it_cannot_hold(change: Any, message: str) -> None:
    params = attention(HEADS)
    with pytest.raises(ValueError, match=message):
        clipped(change(params), maxima(params), tau=1.0)


def test_qk_clip_leaves_a_held_layer_alone() -> None:
    params = attention(HEADS)
    stats = maxima(params)
    stats["layers"]["1"] = stats["layers"]["0"]
    new = clipped(params, stats, tau=1.0)
    assert jax.tree.structure(new) == jax.tree.structure(params)
