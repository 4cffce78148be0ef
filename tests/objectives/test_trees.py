"""Trees of every kind of node go through the algebra with their structure kept."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

from dew.objectives.base import FROZEN, everything, freeze, merge, select, thaw, under
from dew.tree import flatten, map_leaves, path_of, without
from dew.typing import Path
from tests.support.trees import Box, Pair, assert_identical, random_tree

SEEDS = range(24)


def random_filter(seed: int, paths: Any) -> Any:
    """A filter that accepts some of the paths, at least one and not all."""
    chosen = list(paths)
    draw = random.Random(seed)
    kept = set(draw.sample(chosen, draw.randint(1, len(chosen) - 1)))
    return lambda path: path in kept


@pytest.mark.parametrize("seed", SEEDS)
def test_paths_are_those_of_jax_and_name_every_leaf(seed: int) -> None:
    tree = random_tree(seed)
    leaves = flatten(tree)
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    assert set(leaves) == {path_of(keys) for keys, _ in pairs}
    for keys, leaf in pairs:
        assert leaves[path_of(keys)] is leaf
    assert_identical(map_leaves(lambda path, leaf: leaf, tree), tree)


@pytest.mark.parametrize("seed", SEEDS)
def test_merging_a_selection_changes_its_leaves_and_nothing_else(seed: int) -> None:
    tree = random_tree(seed)
    assert_identical(merge(tree, tree), tree)
    keep = random_filter(seed, flatten(tree))
    part = select(tree, keep)
    assert set(flatten(part)) == {path for path in flatten(tree) if keep(path)}
    ones = map_leaves(lambda path, leaf: other_leaf(leaf), part)
    want = map_leaves(lambda path, leaf: other_leaf(leaf) if keep(path) else leaf, tree)
    assert_identical(merge(tree, ones), want)


def other_leaf(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(1000), leaf.shape)
    return jnp.ones_like(leaf)


@pytest.mark.parametrize("seed", SEEDS)
def test_thawing_restores_what_was_frozen_once_or_twice(seed: int) -> None:
    tree = random_tree(seed)
    params = [path for path in flatten(tree) if path[0] == "params"]
    keep = random_filter(seed, params)
    frozen = freeze(tree, keep)
    assert set(flatten({"params": frozen["params"]})) == set(filter(keep, params))
    assert_identical(thaw(frozen), tree)
    assert_identical(without(frozen, "params", FROZEN), without(tree, "params"))
    kept = [path for path in params if keep(path)]
    if len(kept) > 1:
        again = freeze(frozen, under(*kept[0]))
        assert set(flatten({"params": again["params"]})) == {kept[0]}
        assert_identical(thaw(again), tree)


def test_a_selection_drops_empty_modules_and_keeps_the_places_of_a_list() -> None:
    tree = {"params": {"empty": {}, "layers": [{"w": 1}, {"w": 2}], "pair": Pair(3, 4)}}
    full = {"params": {"layers": [{"w": 1}, {"w": 2}], "pair": Pair(3, 4)}}
    assert select(tree, everything) == full
    assert select(tree, under("params", "layers", "1")) == {
        "params": {"layers": [None, {"w": 2}]}
    }
    assert select(tree, under("params", "pair", "right")) == {
        "params": {"pair": Pair(None, 4)}
    }


def test_freezing_and_merging_keep_empty_modules() -> None:
    tree = {"params": {"dropout": {}, "a": {"w": np.ones(1), "act": {}}, "b": 1.0}}
    frozen = freeze(tree, under("params", "b"))
    assert frozen["params"] == {"dropout": {}, "a": {"act": {}}, "b": 1.0}
    assert jax.tree.structure(thaw(frozen)) == jax.tree.structure(tree)
    merged = merge(tree, {"params": {"b": 2.0}})
    assert jax.tree.structure(merged) == jax.tree.structure(tree)


def test_a_frozen_dict_comes_back_as_one() -> None:
    tree = FrozenDict({"params": {"a": np.ones(2), "b": {"c": np.ones(1)}}})
    for made in (merge(tree, {}), select(tree, everything), thaw(tree)):
        assert isinstance(made, FrozenDict)
    frozen = freeze(tree, under("params", "a"))
    assert isinstance(frozen, FrozenDict)
    assert isinstance(thaw(frozen), FrozenDict)


def test_a_record_keeps_what_is_no_leaf_of_it() -> None:
    made = map_leaves(lambda path, leaf: leaf + 1, {"box": Box(1, note="kept")})
    assert made == {"box": Box(2, note="kept")}
    assert list(flatten(made)) == [("box", "value")]


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"qk": (jnp.ones(2), jnp.ones(2))}, "qk/1 is not in the tree"),
        ({"qk": (jnp.ones(3),)}, r"qk/0 is float32\[2\] .* float32\[3\]"),
        ({"key": jnp.ones(2, jnp.uint32)}, r"key is key<fry>\[\] .* uint32\[2\]"),
        ({"key": jax.random.key(0, impl="rbg")}, r"key<fry>.*key<rbg>"),
    ],
)
def test_an_overlay_of_another_form_is_named(overlay: Any, message: str) -> None:
    tree = {"qk": (jnp.zeros(2),), "key": jax.random.key(0)}
    with pytest.raises(ValueError, match=message):
        merge(tree, overlay)


def test_a_key_with_a_slash_is_one_step_of_a_path() -> None:
    tree = {"params": {"a/b": np.zeros(1), "a": {"b": np.zeros(1)}}}
    merged = merge(tree, {"params": {"a/b": np.ones(1)}})
    assert (merged["params"]["a/b"], merged["params"]["a"]["b"]) == (1, 0)
    assert freeze(tree, under("params", "a"))[FROZEN]["a/b"] is tree["params"]["a/b"]


def test_a_key_that_is_no_string_is_refused_by_its_path() -> None:
    def seen(path: Path) -> bool:
        return True

    with pytest.raises(TypeError, match=r"must be strings, but params/layers has 0, 1"):
        select({"params": {"layers": {0: np.ones(1), 1: np.ones(1)}}}, seen)
