"""Optimizers: gradient clipping, an update rule, weight decay and a schedule.

Every optimizer here is one chain, which differs only in its update rule:

    clip by global norm → rule → + decay · weight → · learning rate → · leaf's factor

It takes trees of `{"params": …}` only, so that path filters get full paths as
everywhere in dew, `("params", "layers", "0", "attn", "q", "weight")`, and is called
once per commit.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from optax import contrib

from dew.tree import path_of, slashed
from dew.typing import Path, PathFilter, Variables

Factors: TypeAlias = Sequence[tuple[PathFilter, float]]
"""Multiples of the learning rate; the first filter that accepts a leaf sets its own."""

SHORT_NORMS = ("ln", "bn", "gn")
TABLES = re.compile(r"(?!patch|embed_out|.*norm)\w*embed\w*|wte|wpe|shared")
HEADS = ("head", "lm_head", "embed_out", "score", "classifier")


def is_decayed(path: Path) -> bool:
    """Accepts the leaves that weight decay applies to: all but biases and norms.

    A leaf is left out where its own name or its module's has `bias` or `norm` in it
    (`input_layernorm/weight`, `LayerNorm/bias`, `attn_norm/weight`, T5's
    `relative_attention_bias/weight`) or is `ln`, `bn`, `gn` with or without a suffix
    (`ln_1`, `bn2`). Embeddings are decayed, as transformers' Trainer does. A norm with
    another name, such as `downsample/1`, needs a filter of your own.
    """
    return not any(_is_norm_or_bias(name) for name in path[-2:])


def is_embedding(path: Path) -> bool:
    """Accepts embedding tables (tokens, positions, types) by their module's name.

    That is `wte`, `wpe`, T5's `shared` or one with `embed` in it, except patch
    embeddings and GPT-NeoX's head, `embed_out`. A norm beside the tables
    (`embeddings/LayerNorm/weight`) is not accepted. A tied head is the table's own
    leaf.
    """
    return len(path) > 1 and TABLES.fullmatch(path[-2].lower()) is not None


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optax transformation and the learning-rate schedule it was built with.

    `transform` takes variables trees with `params` only, and may be any optax chain.
    `schedule(commits)` is the learning rate of the next commit, for logs.
    """

    transform: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule

    def then(self, after: optax.GradientTransformation) -> "Optimizer":
        """Returns the optimizer with `after`, such as `qk_clip(100.0)`, at its end."""
        return replace(self, transform=optax.chain(self.transform, after))


class Builder(Protocol):
    """The signature that the optimizers of the command line share."""

    def __call__(
        self,
        learning_rate: float | optax.Schedule,
        *,
        weight_decay: float = ...,
        clip_norm: float | None = ...,
        decay: PathFilter = ...,
        factors: Factors = ...,
    ) -> Optimizer:
        """Builds the optimizer; see `adamw` for the arguments."""
        ...


def adamw(
    learning_rate: float | optax.Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip_norm: float | None = 1.0,
    decay: PathFilter = is_decayed,
    factors: Factors = (),
) -> Optimizer:
    """Builds AdamW as torch computes it, after torch's `clip_grad_norm_`.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).

    Args:
        learning_rate: a number, or a function of the commits made so far; multiplies
            `weight_decay` too, as in torch.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, of the leaves that `decay` accepts.
        clip_norm: the largest global norm of the gradients; None clips nothing.
        decay: the filter of the leaves that decay.
        factors: multiples of the learning rate by filter, as in
            `((is_embedding, 0.1),)`; a leaf's decay is multiplied too, as in a
            parameter group of torch.

    Raises:
        ValueError: `weight_decay` or `clip_norm` is out of range.

    >>> import jax.numpy as jnp
    >>> optimizer = adamw(0.1)
    >>> params = {"params": {"head": {"weight": jnp.ones((2, 2))}}}
    >>> state = optimizer.transform.init(params)
    >>> updates, state = optimizer.transform.update(params, state, params)
    >>> round(float(updates["params"]["head"]["weight"][0, 0]), 4)
    -0.1
    """
    rule = optax.scale_by_adam(b1, b2, eps)
    return _build(rule, learning_rate, weight_decay, clip_norm, decay, factors)


def lion(
    learning_rate: float | optax.Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    clip_norm: float | None = 1.0,
    decay: PathFilter = is_decayed,
    factors: Factors = (),
) -> Optimizer:
    """Builds Lion, which needs a learning rate some 3 to 10 times below AdamW's.

    Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023). Arguments are
    those of `adamw`.
    """
    rule = optax.scale_by_lion(b1, b2)
    return _build(rule, learning_rate, weight_decay, clip_norm, decay, factors)


def sgd(
    learning_rate: float | optax.Schedule,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = 1.0,
    decay: PathFilter = is_decayed,
    factors: Factors = (),
) -> Optimizer:
    """Builds SGD with momentum; decay is decoupled, outside the momentum.

    Arguments are those of `adamw`.
    """
    rule = optax.trace(momentum) if momentum else optax.identity()
    return _build(rule, learning_rate, weight_decay, clip_norm, decay, factors)


def adafactor(
    learning_rate: float | optax.Schedule,
    *,
    factored_from: int = 128,
    weight_decay: float = 0.0,
    clip_norm: float | None = 1.0,
    decay: PathFilter = is_decayed,
    factors: Factors = (),
) -> Optimizer:
    """Builds Adafactor with a given learning rate and factored second moments.

    Leaves with two axes of `factored_from` or more are factored. There is no momentum.
    Shazeer and Stern, "Adafactor" (2018), algorithm 4 without `max(eps, rms(x))`.
    Arguments are those of `adamw`.
    """
    rule = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=factored_from),
        optax.clip_by_block_rms(1.0),
    )
    return _build(rule, learning_rate, weight_decay, clip_norm, decay, factors)


def muon(
    learning_rate: float | optax.Schedule,
    *,
    momentum: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip_norm: float | None = 1.0,
    decay: PathFilter = is_decayed,
    factors: Factors = (),
) -> Optimizer:
    """Builds Muon for the matrices between embedding and head, Adam for the rest.

    Both have Nesterov momentum. Stacks of experts are updated by Adam. Updates are
    scaled to an rms near 0.2, so that both parts use AdamW's learning rate: Liu et al.,
    "Muon is Scalable for LLM Training" (2025), equation 4. Arguments are those of
    `adamw`; `b1` and `b2` are Adam's.

    >>> import jax.numpy as jnp
    >>> leaves = {"q": {"weight": jnp.eye(2)}, "norm": {"bias": jnp.ones(2)}}
    >>> params = {"params": leaves}
    >>> optimizer = muon(0.1)
    >>> state = optimizer.transform.init(params)
    >>> updates, state = optimizer.transform.update(params, state, params)
    >>> print(jnp.round(updates["params"]["norm"]["bias"], 3))
    [-0.147 -0.147]
    """
    # A rate of -1 and no decay leave the bare direction, which the chain then scales.
    rule = contrib.muon(
        -1.0,
        beta=momentum,
        eps=eps,
        adam_b1=b1,
        adam_b2=b2,
        muon_weight_dimension_numbers=partial(_by_path, _matrix),
        consistent_rms=0.2,
    )
    return _build(rule, learning_rate, weight_decay, clip_norm, decay, factors)


OPTIMIZERS: Mapping[str, Builder] = {
    "adamw": adamw,
    "lion": lion,
    "sgd": sgd,
    "adafactor": adafactor,
    "muon": muon,
}
"""Optimizers by the names of the command line."""


def global_norm(tree: Variables) -> Float[Array, ""]:
    """Returns the Euclidean norm over all leaves, summed in float32 or wider."""
    leaves = [_widened(leaf) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum((jnp.sum(jnp.square(leaf)) for leaf in leaves), jnp.zeros(())))


def clip_by_norm(limit: float) -> optax.GradientTransformation:
    """Builds a transformation that clips gradients by global norm, as torch does.

    The scale is `limit / (norm + 1e-6)`; optax's own clipping lacks the 1e-6.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        scale = jnp.minimum(1.0, limit / (global_norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _build(
    rule: optax.GradientTransformation,
    learning_rate: float | optax.Schedule,
    weight_decay: float,
    clip_norm: float | None,
    decay: PathFilter,
    factors: Factors,
) -> Optimizer:
    """Builds the chain of the module's docstring around an update rule."""
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(
            f"clip_norm must be > 0, or None for no limit; got {clip_norm}"
        )
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
    schedule = learning_rate
    if not callable(schedule):
        schedule = optax.constant_schedule(schedule)
    mask = partial(_by_path, lambda path, leaf: decay(path))
    steps = [
        rule,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
        *([_scale_leaves(factors)] if factors else []),
    ]
    if clip_norm is not None:
        steps = [clip_by_norm(clip_norm), *steps]
    return Optimizer(transform=_in_float32(optax.chain(*steps)), schedule=schedule)


def _in_float32(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation in float32 or wider, whatever the params' dtype.

    Updates are returned in the params' dtype.
    """
    # optax raises a float to an integer power, which strict promotion refuses.
    standard = partial(jax.numpy_dtype_promotion, "standard")

    def init(params: Any) -> Any:
        return inner.init(jax.tree.map(_widened, params))

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        wide_updates, wide_params = jax.tree.map(_widened, (updates, params))
        with standard():
            updates, state = inner.update(wide_updates, state, wide_params, **extra)
        return jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)


def _scale_leaves(factors: Factors) -> optax.GradientTransformation:
    """Multiplies each leaf's update by its factor; each filter must accept a leaf."""

    def factor(path: Path, leaf: Any) -> float:
        return next((times for accepts, times in factors if accepts(path)), 1.0)

    def init(params: Any) -> optax.OptState:
        paths: list[Path] = []
        _by_path(lambda path, leaf: paths.append(path), params)
        for i, (accepts, times) in enumerate(factors):
            if not any(accepts(path) for path in paths):
                raise ValueError(
                    f"filter {i} of factors (learning rate times {times}) selects none "
                    f"of the {len(paths)} leaves; paths look like "
                    f"{', '.join(slashed(path) for path in paths[:3])}"
                )
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        times = _by_path(factor, updates)
        return jax.tree.map(lambda u, t: u * t, updates, times), state

    return optax.GradientTransformation(init, update)


def _by_path(function: Callable[[Path, Any], Any], params: Any) -> Any:
    """Maps `function(path, leaf)` over a tree, keeping its containers."""

    def call(keys: Any, leaf: Any) -> Any:
        return function(path_of(keys), leaf)

    return jax.tree_util.tree_map_with_path(call, params)


def _is_norm_or_bias(name: str) -> bool:
    word = name.lower()
    short = word.rstrip("0123456789").split("_")[0].rstrip("0123456789")
    return "bias" in word or "norm" in word or short in SHORT_NORMS


def _matrix(path: Path, leaf: Any) -> contrib.MuonDimensionNumbers | None:
    """Returns the matrix axes of a leaf that Muon updates, None for Adam's leaves.

    Weights have their outputs first; those of attention have a separate heads axis.
    """
    # `is_decayed` too: a bias of attention has two axes, as a matrix has.
    if is_embedding(path) or path[-2] in HEADS or not is_decayed(path):
        return None
    if leaf.ndim == 2:
        return contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    if leaf.ndim == 3 and path[-2] in ("q", "k", "v"):
        return contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=(0, 1))
    if leaf.ndim == 3 and path[-2] == "o":
        return contrib.MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=0)
    return None


def _widened(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if jnp.finfo(leaf.dtype).bits < 32 else leaf
