"""QK-Clip: bounds attention logits by rescaling query and key weights.

Kimi Team, "Kimi K2: Open Agentic Intelligence" (2025), section 2.1 (MuonClip).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from jaxtyping import Array, Float

from dew.tree import flatten, path_of, slashed
from dew.typing import Path, Variables


def qk_clip(tau: float, *, alpha: float = 0.5) -> optax.GradientTransformationExtraArgs:
    """Rescales the queries and keys of heads whose largest logit exceeded `tau`.

    It must be the last of a chain, as in `adamw(…).then(qk_clip(100.0))`: it rescales
    the weights as the update leaves them. A head with maximum m gets gamma = min(1, tau
    / m); its query weight and bias are multiplied by gamma**alpha, its key's by
    gamma**(1 - alpha). Where several query heads read one key head, the key takes the
    strictest gamma among them, so every head ends at or below `tau`, and the milder
    ones of that group somewhat lower than they had to. In a layer with `qk_nope`
    (multi-head latent attention) this holds for the first `qk_nope` rows of a head; the
    rotary rows of its query are multiplied by gamma, and rotary keys, which all heads
    share, stay.

    `update` takes `qk_stats=`, the `qk` collection of the forward pass: nested by
    module path, each attention layer holding `max_logits`, a tuple of [rows, heads]
    arrays. None changes nothing, and neither does a layer whose q and k are not in
    `params`. A maximum that is not finite clips nothing: rejecting such a step is the
    trainer's.

    Raises:
        ValueError: on `update`, where a layer cannot be clipped: it holds only one of
            q and k, or norms after them that would undo the scale; or where `params`
            has none of the layers.
    """
    if not tau > 0:
        raise ValueError(f"tau must be > 0, got {tau}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        qk_stats: Variables | None = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        if qk_stats is None:
            return updates, state
        scales = _scales(flatten(params), qk_stats, tau, alpha)

        def rescale(keys: Any, step: Any, weight: Any) -> Any:
            scale = scales.get(path_of(keys))
            return step if scale is None else _rescaled_update(weight, step, scale)

        return jax.tree_util.tree_map_with_path(rescale, updates, params), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _scales(
    params: dict[Path, Any], qk_stats: Variables, tau: float, alpha: float
) -> dict[Path, Float[Array, "heads dim"]]:
    """Returns the factor of each query and key leaf, for every row of each head."""
    layers = _sown(qk_stats, "max_logits")
    widths = _sown(qk_stats, "qk_nope")
    pairs = {layer: _queries_and_keys(params, layer) for layer in layers}
    if not any(pairs.values()):
        raise ValueError(
            f"qk_stats holds {', '.join(map(slashed, layers)) or 'no max_logits'}, but "
            f"params has q and k under none of that; its paths look like "
            f"{', '.join(slashed(path) for path in list(params)[:3])}"
        )
    scales = {}
    for layer, maxima in layers.items():
        gamma = _gamma(maxima, tau)
        for path in pairs[layer]:
            heads, dim = params[path].shape[:2]
            # Without qk_nope there are no rotary rows apart.
            nope = jnp.arange(dim) < widths.get(layer, [dim])[0]
            if path[len(layer)] == "q":
                scaled, rotary = gamma**alpha, gamma
            else:
                strictest = rearrange(gamma, "(k g) -> k g", k=heads).min(axis=1)
                scaled, rotary = strictest ** (1 - alpha), jnp.ones_like(strictest)
            scales[path] = jnp.where(nope[None], scaled[:, None], rotary[:, None])
    return scales


def _sown(qk_stats: Variables, name: str) -> dict[Path, list[Any]]:
    """Returns what each attention layer sowed under a name, by the layer's path.

    What flax sows is a tuple; a plain array counts as one of itself.
    """
    sown: dict[Path, list[Any]] = {}
    for path, leaf in flatten(qk_stats).items():
        if name in path[-2:]:
            layer = path[:-1] if path[-1] == name else path[:-2]
            sown.setdefault(("params", *layer), []).append(leaf)
    return sown


def _queries_and_keys(params: dict[Path, Any], layer: Path) -> list[Path]:
    """Returns the leaves that set a layer's logits; none where it is not trained."""
    under = [path for path in params if path[: len(layer)] == layer]
    names = {path[len(layer)] for path in under}
    norms, pair = names & {"q_norm", "k_norm"}, names & {"q", "k"}
    if pair and norms:
        raise ValueError(
            f"{slashed(layer)} has {' and '.join(sorted(norms))}, which undo any scale "
            f"of q and k: QK-Clip cannot hold its logits; leave qk_clip out, the norms "
            f"bound them already"
        )
    if len(pair) == 1:
        raise ValueError(
            f"{slashed(layer)} trains {pair.pop()} alone, but QK-Clip rescales q and k "
            f"together; train both, hold both, or leave qk_clip out"
        )
    return [path for path in under if path[len(layer)] in pair]


def _gamma(maxima: list[Any], tau: float) -> Float[Array, " heads"]:
    """Returns min(1, tau / m) per head, m over all rows and calls of the layer."""
    rows = jnp.concatenate([leaf.astype(jnp.float32) for leaf in maxima])
    largest = rows.max(axis=0)
    above = jnp.isfinite(largest) & (largest > tau)
    return jnp.where(above, tau / largest, 1.0)


def _rescaled_update(weight: Any, step: Any, scale: Float[Array, "heads dim"]) -> Any:
    """Returns the update that takes `weight` to (weight + step) · scale."""
    scale = jax.lax.expand_dims(scale, range(2, weight.ndim))
    wide_weight, wide_step = weight.astype(scale.dtype), step.astype(scale.dtype)
    # Not (weight + step) · scale - weight, which would round where scale is 1.
    return (wide_step * scale + wide_weight * (scale - 1)).astype(step.dtype)
