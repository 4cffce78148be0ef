"""Rules read the same tensor forwards and backwards, in every layout."""

import numpy as np
import pytest

from dew.converters.mapping.build import build_table
from dew.converters.mapping.layout import Layout
from dew.converters.mapping.rules import Rule
from dew.converters.mapping.table import Piece, Table
from dew.typing import Path

Stored = dict[str, np.ndarray]
EMBED = 5


def stored(**shapes: tuple[int, ...]) -> Stored:
    """Tensors of numbers that are all different."""
    rng = np.random.default_rng(0)
    return {
        name.replace("_", "."): rng.permutation(int(np.prod(shape))).reshape(shape)
        for name, shape in shapes.items()
    }


def table_of(rules: list[Rule], **shapes: tuple[int, ...]) -> Table:
    """The table of a model with these variables."""
    variables = {("params", *n.split("_")): shape for n, shape in shapes.items()}
    return build_table(rules, variables)


def read(table: Table, tensors: Stored) -> dict[Path, np.ndarray]:
    return {path: table.read(path, tensors.__getitem__, ()) for path in table.variables}


def written(table: Table, variables: dict[Path, np.ndarray]) -> Stored:
    def entry(piece: Piece) -> np.ndarray:
        whole = variables[piece.target]
        if piece.entry is None:
            return whole
        return np.take(whole, piece.entry, axis=piece.axis)

    return {name: table.write(name, entry) for name in table.sources}


def assert_same(got: Stored, want: Stored) -> None:
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def test_a_linear_is_a_view_of_the_stored_tensor() -> None:
    rule = Rule("q.weight", "q/weight", "(heads dim) embed -> heads dim embed")
    table = table_of([rule], q_weight=(4, 3, EMBED))
    tensors = stored(q_weight=(12, EMBED))
    q = read(table, tensors)["params", "q", "weight"]
    assert np.shares_memory(q, tensors["q.weight"])
    np.testing.assert_array_equal(q[2, 1], tensors["q.weight"][7])


def test_unequal_blocks_laid_end_to_end_are_one_shared_tensor() -> None:
    layout = "(| heads dim) embed -> heads dim embed"
    table = table_of(
        [Rule("qkv.weight", f"{x}/weight", layout) for x in "qkv"],
        q_weight=(4, 3, EMBED),
        k_weight=(2, 3, EMBED),
        v_weight=(2, 3, EMBED),
    )
    tensors = stored(qkv_weight=(24, EMBED))
    variables = read(table, tensors)
    k = variables["params", "k", "weight"]
    np.testing.assert_array_equal(k.reshape(6, EMBED), tensors["qkv.weight"][12:18])
    assert_same(written(table, variables), tensors)


def test_blocks_that_repeat_for_every_kv_head_come_apart() -> None:
    table = table_of(
        [
            Rule("a.w", "q/w", "(kv | group dim) embed -> (kv group) dim embed"),
            Rule("a.w", "k/w", "(kv | dim) embed -> kv dim embed"),
            Rule("a.w", "v/w", "(kv | dim) embed -> kv dim embed"),
        ],
        q_w=(6, 4, EMBED),
        k_w=(2, 4, EMBED),
        v_w=(2, 4, EMBED),
    )
    tensors = stored(a_w=(2 * 5 * 4, EMBED))
    groups = tensors["a.w"].reshape(2, 5, 4, EMBED)
    variables = read(table, tensors)
    np.testing.assert_array_equal(
        variables["params", "q", "w"], groups[:, :3].reshape(6, 4, EMBED)
    )
    np.testing.assert_array_equal(variables["params", "v", "w"], groups[:, 4])
    assert_same(written(table, variables), tensors)


def test_rows_that_alternate_come_apart() -> None:
    rules = [Rule("gu.w", f"{x}/w", "embed (mlp |) -> mlp embed") for x in "gu"]
    table = table_of(rules, g_w=(3, EMBED), u_w=(3, EMBED))
    tensors = stored(gu_w=(EMBED, 6))
    variables = read(table, tensors)
    np.testing.assert_array_equal(
        variables["params", "u", "w"], tensors["gu.w"][:, 1::2].T
    )
    assert_same(written(table, variables), tensors)


def test_a_transposed_and_fused_conv1d_splits_into_heads() -> None:
    layout = "embed (| heads dim) -> heads dim embed"
    rules = [Rule("c.weight", f"{x}/weight", layout) for x in "qkv"]
    table = table_of(
        rules, **dict.fromkeys(("q_weight", "k_weight", "v_weight"), (2, 3, EMBED))
    )
    tensors = stored(c_weight=(EMBED, 18))
    variables = read(table, tensors)
    want = tensors["c.weight"][:, 6:12].T.reshape(2, 3, EMBED)
    np.testing.assert_array_equal(variables["params", "k", "weight"], want)
    assert_same(written(table, variables), tensors)


def test_experts_stack_and_only_those_asked_for_are_read() -> None:
    rule = Rule("e.{e}.up", "layers/{n}/up", "mlp embed -> e mlp embed")
    rule = Rule("l.{n}.e.{e}.up", rule.target, rule.layout)
    table = table_of([rule], layers_0_up=(4, 3, EMBED), layers_1_up=(4, 3, EMBED))
    names = {f"l_{n}_e_{e}_up": (3, EMBED) for n in range(2) for e in range(4)}
    tensors = stored(**names)
    asked: list[str] = []

    def look(name: str) -> np.ndarray:
        asked.append(name)
        return tensors[name]

    path = ("params", "layers", "1", "up")
    part = table.read(path, look, (slice(1, 3), slice(None), slice(0, 2)))
    assert asked == ["l.1.e.1.up", "l.1.e.2.up"]
    np.testing.assert_array_equal(part[1], tensors["l.1.e.2.up"][:, :2])
    assert_same(written(table, read(table, tensors)), tensors)


def test_experts_may_be_fused_inside_one_tensor() -> None:
    rules = [Rule("gate_up", f"{x}/w", "e (| mlp) embed -> e mlp embed") for x in "gu"]
    table = table_of(rules, g_w=(4, 3, EMBED), u_w=(4, 3, EMBED))
    tensors = stored(x=(4, 6, EMBED))
    tensors = {"gate_up": tensors["x"]}
    assert_same(written(table, read(table, tensors)), tensors)


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        ([Rule("a", "q/w"), Rule("b", "q/w")], "q/w has 2 rules: a, b"),
        ([Rule("a", "k/w")], "q/w has no rule"),
        ([Rule("a.{e}", "q/w")], "leaves e open"),
    ],
)
def test_a_table_that_does_not_cover_its_model_once_is_refused(
    rules: list[Rule], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        table_of(rules, q_w=(2, 3))


def test_two_variables_from_one_tensor_must_mark_how_they_share_it() -> None:
    rules = [Rule("a", "q/w"), Rule("a", "k/w")]
    with pytest.raises(
        ValueError, match="a is read for q/w, k/w, whose layouts do not"
    ):
        table_of(rules, q_w=(2, 3), k_w=(2, 3))


def test_a_layout_that_does_not_fit_its_variable_says_so() -> None:
    with pytest.raises(ValueError, match=r"makes a variable of 3 axes.*\(4, 4\)"):
        Layout("(heads dim) embed -> heads dim embed").sizes((4, 4), {})
    with pytest.raises(ValueError, match="kv · group is not 6"):
        Layout("kv (kv group) -> kv (kv group)").sizes((4, 6), {})
