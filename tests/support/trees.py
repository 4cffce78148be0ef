"""Random variables trees of every kind of node and leaf that a run may hold."""

import random
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "bool")


class Pair(NamedTuple):
    """A named tuple of two branches."""

    left: Any
    right: Any


@flax.struct.dataclass
class Box:
    """A record with a branch and a note that is no leaf."""

    value: Any
    note: str = flax.struct.field(pytree_node=False, default="")


def random_leaf(draw: random.Random) -> Any:
    kind = draw.choice(["array"] * 4 + ["key"])
    shape = draw.choice([(), (3,), (2, 2), (0, 4)])
    if kind == "key":
        return jax.random.split(jax.random.key(draw.randrange(99)), shape)
    values = np.random.default_rng(draw.randrange(2**32)).normal(size=shape) * 4
    return jnp.asarray(values).astype(draw.choice(DTYPES))


def random_node(draw: random.Random, depth: int) -> Any:
    """A branch of at most `depth` nodes above a leaf; some are empty modules."""
    if depth == 0 or draw.random() < 0.2:
        return random_leaf(draw) if draw.random() < 0.8 else draw.choice([{}, (), None])
    children = [random_node(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    kind = draw.choice(["dict", "frozen", "tuple", "list", "pair", "box"])
    if kind in ("dict", "frozen"):
        names = draw.sample(["a", "b", "scale", "0", "w/x"], len(children))
        entries = dict(zip(names, children, strict=True))
        return entries if kind == "dict" else FrozenDict(entries)
    if kind == "pair":
        return Pair(children[0], children[-1])
    if kind == "box":
        return Box(children[0], note="kept")
    return tuple(children) if kind == "tuple" else children


def random_tree(seed: int) -> Any:
    """Variables with `params` of at least two leaves, a sown and a third collection."""
    draw = random.Random(seed)
    params = {
        "first": {"w": jnp.ones(2), "dropout": {}},
        "second": random_node(draw, 3),
        "third": [{"w": jnp.zeros(3, jnp.bfloat16)}, random_node(draw, 2)],
    }
    tree = {
        "params": FrozenDict(params) if draw.random() < 0.3 else params,
        "qk": {"attn": {"max_logits": (random_leaf(draw),)}},
        "state": random_node(draw, 3),
    }
    return FrozenDict(tree) if draw.random() < 0.3 else tree


def assert_identical(got: Any, want: Any) -> None:
    """Trees of one structure with the same bits, dtypes and random keys."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
