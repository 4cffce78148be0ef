"""The names of the contract, and what the base and the tree algebra promise."""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

from dew.objectives import base
from dew.objectives.base import (
    AVERAGE,
    FROZEN,
    Aux,
    EMASpec,
    Mean,
    Prediction,
    Step,
    everything,
    freeze,
    mean_loss,
    mean_of_totals,
    merge,
    merge_totals,
    scalar_loss,
    select,
    thaw,
    under,
)
from dew.training.step import TrainStep
from dew.training.trainer import Trainer
from tests.support.objectives import MOMENTUM, Run, Toy, as_mean, microbatch
from tests.support.tolerances import CHECK_GRADS, RTOL, assert_trees_close

# The page of dew.objectives.base: its table of names, in its order.
NAMES = """
Task Variables Batch Path PathFilter Initializer Mean mean_loss Loss Effects Step Aux
Prediction everything under select merge FROZEN freeze thaw EMASpec Objective
scalar_loss S Metric merge_totals mean_of_totals
""".split()

MEMBERS = """
artifact inputs ema bank_sites initializer held_variables init loss reduce_loss
apply_effects predict evaluate pipeline preview
""".split()

PARAMETERS = {
    base.mean_loss: "stats",
    base.everything: "path",
    base.under: "*prefix",
    base.select: "tree keep",
    base.merge: "tree overlay",
    base.freeze: "variables trainable",
    base.thaw: "variables",
    # Our own option stands after the page's, by keyword.
    base.EMASpec: "decay select dtype",
    base.scalar_loss: "objective variables batch step",
    base.merge_totals: "accumulated contribution",
    base.mean_of_totals: "accumulated",
    base.Mean: "total mass",
    base.Step: "step key ema",
    base.Prediction: "logits losses weights hidden",
    base.Aux: "metrics variables qk_stats effects",
    base.Objective.held_variables: "self",
    base.Objective.init: "self key variables",
    base.Objective.loss: "self params batch step",
    base.Objective.reduce_loss: "self stats",
    base.Objective.apply_effects: "self variables effects",
    base.Objective.predict: "self params batch step train layers",
    base.Objective.evaluate: "self params batch step",
    base.Objective.pipeline: "self state ema",
    base.Objective.preview: "self params batch step scored",
    base.Metric.merge: "self accumulated contribution",
    base.Metric.finalize: "self accumulated",
}

TREE = {
    "params": {"a": {"w": np.ones(2, np.float32)}, "b": {"w": np.zeros(3)}},
    "batch_stats": {"a": {"mean": np.full(2, 5.0)}},
}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_page_is_in_the_module(name: str) -> None:
    assert name in vars(base)


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_of_an_objective_is_in_the_base(name: str) -> None:
    attributes = {**vars(base.Objective), **base.Objective.__annotations__}
    assert name in attributes


@pytest.mark.parametrize(("of", "names"), PARAMETERS.items())
def test_signatures_are_those_of_the_page(of: Any, names: str) -> None:
    parameters = inspect.signature(of).parameters.values()
    star = {inspect.Parameter.VAR_POSITIONAL: "*"}
    assert [star.get(p.kind, "") + p.name for p in parameters] == names.split()


def test_the_fields_of_aux_are_by_position_or_keyword_and_empty_by_default() -> None:
    aux = Aux()
    assert (aux.metrics, aux.variables, aux.qk_stats, aux.effects) == ({}, *[None] * 3)
    one, stats, maxima = jnp.ones(()), {"batch_stats": {}}, {"layers": {}}
    by_name = Aux(
        metrics={"a": one}, variables=stats, qk_stats=maxima, effects={"seen": one}
    )
    by_place = Aux({"a": one}, stats, maxima, {"seen": one})
    assert by_place == by_name


@pytest.mark.parametrize("keyword", ["train", "layers"])
def test_predict_takes_its_switches_by_keyword(keyword: str) -> None:
    parameter = inspect.signature(base.Objective.predict).parameters[keyword]
    assert parameter.kind is parameter.KEYWORD_ONLY


def test_the_records_are_pytrees() -> None:
    zero = jnp.zeros(())
    for record in (Mean(zero, zero), Step(zero, zero), Prediction(zero, zero, zero)):
        again = jax.tree.map(lambda leaf: leaf + 1, record)
        assert type(again) is type(record)
        assert jax.tree.leaves(again)[0] == 1


# Mean and mean_loss


def test_means_add_leaf_by_leaf_and_pool_by_mass() -> None:
    pooled = Mean(jnp.float32(6), jnp.float32(2)) + Mean(jnp.float32(3), jnp.float32(7))
    assert (pooled.total, pooled.mass) == (9, 9)
    assert mean_loss(pooled) == (1, True)


def test_sums_and_masses_are_float32_whatever_the_dtype() -> None:
    ones = jnp.ones(1000, jnp.bfloat16)
    stats = Mean.of(ones, ones)
    assert (stats.total, stats.mass) == (1000, 1000)
    half = Mean(jnp.bfloat16(256), jnp.bfloat16(256))
    pooled = half + Mean(jnp.bfloat16(1), jnp.bfloat16(1))
    assert (pooled.total.dtype, pooled.total) == (jnp.float32, 257)
    assert mean_loss(half)[0].dtype == jnp.float32


@pytest.mark.parametrize("mass", [4.0, 4, np.float64(4), jnp.int32(4)])
def test_a_mass_may_be_any_real_number(mass: Any) -> None:
    assert mean_loss(Mean(jnp.float32(2), mass)) == (0.5, True)


@pytest.mark.parametrize("total", [0.0, jnp.nan, jnp.inf])
def test_zero_mass_gives_zero_without_gradient(total: float) -> None:
    def value(total: Any, mass: Any) -> Any:
        return mean_loss(Mean(total, mass))[0]

    arguments = jnp.float32(total), jnp.float32(0)
    assert mean_loss(Mean(*arguments))[1] == np.False_
    assert value(*arguments) == 0
    assert jax.grad(value, (0, 1))(*arguments) == (0, 0)


def test_no_gradient_flows_through_the_mass() -> None:
    def value(w: Any) -> Any:
        return mean_loss(Mean(w, 3 * w))[0]

    assert jax.grad(value)(jnp.float32(2)) == np.float32(1 / 6)


def test_a_value_without_weight_touches_neither_sum_nor_gradient() -> None:
    def value(x: Any) -> Any:
        return mean_loss(Mean.of(x, jnp.asarray([1.0, 0.0])))[0]

    x = jnp.asarray([3.0, jnp.nan])
    assert value(x) == 3
    np.testing.assert_array_equal(jax.grad(value)(x), [1, 0])


# The base objective


@pytest.mark.parametrize(
    "number",
    [2, 2.0, True, np.float64(2), np.asarray(2), jnp.int32(2), jnp.bfloat16(2)],
    ids=lambda n: f"{type(n).__module__}.{type(n).__name__}",
)
def test_any_real_scalar_reduces_to_itself(number: Any) -> None:
    value, active = Toy().reduce_loss(number)
    assert (float(value), bool(active)) == (float(number), True)
    assert value.dtype == jnp.float32


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        (jnp.ones((2, 3)), r"Toy.loss must return one real .* of shape \(2, 3\)"),
        (np.ones(1), r"of shape \(1,\)"),
        (jnp.complex64(1), "one real number or a Mean, got complex64"),
        ([1.0, 2.0], "Toy must define reduce_loss; got list"),
        (None, "got NoneType"),
    ],
)
def test_other_statistics_need_their_own_reduction(stats: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Toy().reduce_loss(stats)


def test_what_an_objective_lacks_is_a_type_error_that_names_it() -> None:
    toy, batch, step = Toy(), {}, Step(jnp.int32(0), jax.random.key(0))
    with pytest.raises(TypeError, match="Toy lacks apply_effects"):
        toy.apply_effects({}, None)
    with pytest.raises(TypeError, match="Toy lacks predict"):
        toy.predict({}, batch, step, train=False)
    with pytest.raises(TypeError, match="Toy lacks pipeline"):
        toy.pipeline(Run(toy).state)


def test_the_base_evaluates_nothing_and_previews_what_was_scored() -> None:
    class Scoring(Toy):
        def evaluate(self, params: Any, batch: Any, step: Step) -> Any:
            return "evaluated"

    step = Step(jnp.int32(0), jax.random.key(0))
    assert Toy().evaluate({}, {}, step) is None
    assert Toy().preview({}, {}, step) is None
    assert Scoring().preview({}, {}, step) == "evaluated"
    assert Scoring().preview({}, {}, step, scored="scored") == "scored"
    assert (Toy().artifact, Toy().ema, Toy().bank_sites) == (None, None, ())


class Compared(Toy):
    """Pulled to the labels, and back to a frozen copy of its first weights."""

    held = (FROZEN, "policy_before")
    reference = "policy_before"

    def init(self, key: Any, variables: Any = None) -> Any:
        start = {"w": jnp.asarray([0.5, -1.0, 2.0])}
        return {"params": start, "policy_before": start}

    def loss(self, params: Any, batch: Any, step: Step) -> Any:
        stats, aux = as_mean(params, batch, step)
        gap = params["params"]["w"] - params["policy_before"]["w"]
        return replace(stats, total=stats.total + jnp.sum(gap**2)), aux


class ComparedWithAverage(Toy):
    """The same, with an average that never moves as its frozen copy."""

    reference = AVERAGE

    def loss(self, params: Any, batch: Any, step: Step) -> Any:
        stats, aux = as_mean(params, batch, step)
        average: Any = step.ema
        gap = params["params"]["w"] - average["params"]["w"]
        return replace(stats, total=stats.total + jnp.sum(gap**2)), aux


@pytest.mark.parametrize("ema", [True, False])
@pytest.mark.parametrize(
    "objective",
    [
        Compared(ema=EMASpec(lambda n: 0.5, under("params"))),
        ComparedWithAverage(ema=EMASpec(lambda n: 1.0)),
    ],
    ids=["collection", "average"],
)
def test_a_policy_is_published_and_never_its_reference(
    objective: Toy, ema: bool
) -> None:
    run = Run(objective)
    first = run.state.variables["params"]["w"]
    run.feed(microbatch(1), microbatch(2))
    published = objective.published(run.state, ema=ema)
    is_average = ema and objective.reference != AVERAGE
    want: Any = run.state.averaged if is_average else run.state.variables
    assert set(published) == {"params"}
    np.testing.assert_array_equal(published["params"]["w"], want["params"]["w"])
    assert not np.any(np.isclose(published["params"]["w"], first))


def test_published_averages_need_an_average() -> None:
    with pytest.raises(ValueError, match="this run keeps no EMA; give ema=False"):
        Compared().published(Run(Compared()).state, ema=True)


HALF = EMASpec(lambda n: 0.5)
SPEC = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}


class Bare(base.Objective[Mean]):
    """What a subclass must define, and nothing beside it."""

    def init(self, key: Any, variables: Any = None) -> Any:
        return {"params": {"w": jnp.ones(3)}}

    def loss(self, params: Any, batch: Any, step: Step) -> tuple[Mean, Aux[Any]]:
        return as_mean(params, batch, step)


class Assigning(Bare):
    def __init__(self) -> None:
        self.inputs = SPEC
        self.bank_sites = ()
        self.artifact = str
        self.ema = EMASpec(lambda n: 0.5)
        self.initializer = base.Initializer(self.init)


@dataclass(frozen=True, eq=False)
class Declaring(Bare):
    inputs: Any
    initializer: Any
    bank_sites: Any
    artifact: Any = str
    ema: Any = HALF


class Computing(Bare):
    @property
    def inputs(self) -> Any:
        return SPEC

    @property
    def bank_sites(self) -> Any:
        return ()

    @property
    def artifact(self) -> Any:
        return str

    @property
    def ema(self) -> Any:
        return EMASpec(lambda n: 0.5)

    @property
    def initializer(self) -> Any:
        return base.Initializer(self.init)


@pytest.mark.parametrize(
    "objective",
    [Assigning(), Declaring(SPEC, base.Initializer(Bare().init), ()), Computing()],
    ids=lambda objective: type(objective).__name__,
)
def test_attributes_are_set_or_fields_or_properties(objective: Any) -> None:
    assert (objective.inputs, objective.bank_sites) == (SPEC, ())
    assert objective.artifact is str
    data = iter([microbatch(0), microbatch(1)])
    trainer = Trainer(objective, optax.sgd(0.1), key=jax.random.key(0))
    state = trainer.fit(data, steps=2)
    assert (int(state.commits), list(state.ema)) == (2, ["params"])


def test_an_objective_without_inputs_is_refused_at_the_start_of_a_run() -> None:
    trainer = Trainer(Bare(), optax.sgd(0.1), key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"Bare lacks inputs.*self\.inputs in __init__"):
        trainer.fit(iter([microbatch(0)]), steps=1)


def test_a_fault_inside_a_property_is_told_as_it_is() -> None:
    class Faulty(Bare):
        @property
        def inputs(self) -> Any:
            faulty: Any = self
            return {"x": faulty.nothing}

    with pytest.raises(AttributeError, match=r"'Faulty' object has no .* 'nothing'"):
        _ = Faulty().inputs


def test_scalar_loss_differentiates_directly() -> None:
    toy, batch = Toy(), microbatch(1, (1, 2, 0))
    step = Step(jnp.int32(0), jax.random.key(0))

    def value(params: Any) -> Any:
        return scalar_loss(toy, {"params": params}, batch, step)[0]

    params = toy.init(jax.random.key(0))["params"]
    want = mean_loss(as_mean({"params": params}, batch, step)[0])[0]
    assert value(params) == want
    check_grads(value, (params,), order=1, modes=["rev"], rtol=CHECK_GRADS)


def test_the_state_is_built_from_held_arrays_as_arguments() -> None:
    def compiled(rows: int) -> Any:
        toy = Toy(start={"params": {"w": jnp.ones((rows, 64))}})
        build = jax.jit(TrainStep(objective=toy, optimizer=MOMENTUM).initial)
        return build.lower(toy.initializer, jax.random.key(0)).compile()

    small, large = compiled(64), compiled(64 * 64)
    # 16 KiB of weights and 1 MiB: only the digits of their shapes may differ. Seen: 79
    # characters of 41701, and 137 bytes of 53815.
    texts = [len(c.as_text()) for c in (small, large)]
    sizes = [len(c.runtime_executable().serialize()) for c in (small, large)]
    assert abs(texts[0] - texts[1]) < 256, texts
    assert abs(sizes[0] - sizes[1]) < 1024, sizes


def test_an_initializer_dispatches_through_the_public_init() -> None:
    class Doubled(Toy):
        def init(self, key: Any, variables: Any = None) -> Any:
            return jax.tree.map(lambda leaf: 2 * leaf, variables)

    held = {"params": {"w": jnp.ones(3)}}
    made = jax.jit(lambda init, key: init(key))(
        Doubled(start=held).initializer, jax.random.key(0)
    )
    np.testing.assert_array_equal(made["params"]["w"], [2, 2, 2])


# Variables trees


def test_select_keeps_the_nesting_and_drops_empty_branches() -> None:
    subtree = select(TREE, under("params", "a"))
    assert set(subtree) == {"params"}
    assert set(subtree["params"]) == {"a"}
    assert_trees_close(select(TREE, everything), TREE, rtol=0)


def test_a_filter_that_selects_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"selects none of the 3 leaves.*params/a/w"):
        select(TREE, under("params", "c"))


def test_merge_puts_a_selection_back() -> None:
    overlay = jax.tree.map(lambda leaf: leaf + 1, select(TREE, under("params", "b")))
    merged = merge(TREE, overlay)
    np.testing.assert_array_equal(merged["params"]["b"]["w"], np.ones(3))
    assert merged["params"]["a"]["w"] is TREE["params"]["a"]["w"]
    np.testing.assert_array_equal(TREE["params"]["b"]["w"], np.zeros(3))


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"params": {"c": {"w": np.ones(2)}}}, "params/c/w is not in the tree"),
        ({"params": {"a": {"w": np.ones(3)}}}, r"params/a/w is float32\[2\].*\[3\]"),
        ({"params": {"a": {"w": np.ones(2, np.float16)}}}, "params/a/w.*float16"),
        ({"params": {"a": np.ones(2)}}, "params/a is not in the tree"),
    ],
)
def test_an_overlay_that_does_not_fit_is_named(overlay: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(TREE, overlay)


def test_freeze_moves_what_does_not_train_and_thaw_undoes_it() -> None:
    frozen = freeze(TREE, under("params", "a"))
    assert set(frozen) == {"params", FROZEN, "batch_stats"}
    assert (set(frozen["params"]), set(frozen[FROZEN])) == ({"a"}, {"b"})
    assert_trees_close(thaw(frozen), TREE, rtol=0)
    assert_trees_close(thaw(TREE), TREE, rtol=0)


def test_freezing_twice_loses_nothing() -> None:
    tree = {"params": {**TREE["params"], "c": {"w": np.ones(1)}}}
    once = freeze(tree, lambda path: path[1] != "b")
    twice = freeze(once, under("params", "a"))
    assert (set(twice["params"]), set(twice[FROZEN])) == ({"a"}, {"b", "c"})
    assert_trees_close(thaw(twice), tree, rtol=0)
    assert_trees_close(freeze(twice, under("params", "a")), twice, rtol=0)


@pytest.mark.parametrize(
    ("keep", "message"),
    [(everything, "keeps every one"), (under("params", "c"), "keeps none")],
)
def test_a_filter_that_splits_nothing_is_refused(keep: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} of the 2 params leaves"):
        freeze(TREE, keep)
    with pytest.raises(ValueError, match=message):
        freeze(freeze(TREE, under("params", "a")), keep)


# Totals


def test_totals_weigh_batches_by_their_counts() -> None:
    totals = merge_totals((6.0, 2.0), (1.0, 5.0))
    assert totals == (7.0, 7.0)
    np.testing.assert_allclose(mean_of_totals(totals), 1.0, rtol=RTOL["float64"])


def test_a_pass_without_records_has_no_mean() -> None:
    with pytest.raises(ValueError, match="the validation pass was empty"):
        mean_of_totals((0.0, 0.0))
