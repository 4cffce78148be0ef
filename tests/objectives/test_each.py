"""What each objective does of its own: against torch, float64 numpy, or by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn import functional

from dew.losses.supervised import Classification, Regression
from dew.objectives.barlow_twins import BarlowTwins, CrossMoments
from dew.objectives.base import EMASpec, Step, under
from dew.objectives.causal_lm import CausalLM
from dew.objectives.jepa import JEPA
from dew.objectives.masked_lm import MaskedLM, hide_tokens
from dew.objectives.metrics import Accuracy, MeanLoss
from dew.objectives.supervised import LabelScores, Supervised
from dew.source import Source
from dew.tasks.scoring import Scoring
from tests.support.models import (
    PATCHES,
    PIXELS,
    STATES,
    TEXT,
    Encoder,
    Guesser,
    Perceptron,
    loaded,
    tiny_decoder,
)
from tests.support.objectives import Run
from tests.support.tolerances import (
    ACCUMULATION,
    AVERAGE,
    RTOL,
    SHARES,
    assert_trees_close,
)

DRAW = np.random.default_rng(11)
READS = {"pixels": jax.ShapeDtypeStruct((5,), jnp.float32)}


def texts(seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    mask = np.arange(6)[None] < np.asarray([6, 3])[:, None]
    tokens = draw.integers(0, 11, (2, 6)).astype(np.int32)
    return {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask)}


def pixels(seed: int, rows: int = 4) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, 5)).astype(np.float32)
    labels = draw.integers(0, 3, rows).astype(np.int32)
    return {"pixels": jnp.asarray(x), "labels": jnp.asarray(labels)}


# Masked language modelling


def hidden(key: int, free: Any = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = jnp.asarray(DRAW.integers(5, 1000, (64, 512)), jnp.int32)
    free = jnp.broadcast_to(jnp.asarray(free), tokens.shape)
    new, labels = hide_tokens(
        tokens, free, jax.random.key(key), rate=0.15, mask_id=4, vocab=1000
    )
    return np.asarray(tokens), np.asarray(new), np.asarray(labels)


def test_fifteen_in_a_hundred_are_hidden_and_eighty_of_those_masked() -> None:
    tokens, new, labels = hidden(0)
    is_hidden = labels >= 0
    np.testing.assert_array_equal(labels[is_hidden], tokens[is_hidden])
    np.testing.assert_array_equal(new[~is_hidden], tokens[~is_hidden])
    assert abs(is_hidden.mean() - 0.15) < SHARES["hidden"]
    fates = new[is_hidden] == 4, new[is_hidden] == tokens[is_hidden]
    assert abs(fates[0].mean() - 0.8) < SHARES["masked"]
    assert abs(fates[1].mean() - 0.1) < SHARES["unchanged"]


def test_padding_and_special_tokens_are_never_hidden() -> None:
    free = np.arange(512)[None] < 100
    _, _, labels = hidden(1, free)
    assert (labels[:, 100:] == -100).all()
    model = MaskedLM(
        source=loaded(tiny_decoder(), TEXT),
        seq_len=6,
        vocab=11,
        mask_id=10,
        special_ids=tuple(range(1, 11)),
        rate=1.0,
    )
    variables = model.init(jax.random.key(0))
    batch = texts(0)
    scores = model.evaluate(variables, batch, Step(jnp.int32(0), jax.random.key(0)))
    want = (np.asarray(batch["tokens"]) == 0) & np.asarray(batch["mask"])
    np.testing.assert_array_equal(np.asarray(scores.weights), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 0.0}, r"rate must be in \(0, 1\], got 0.0"),
        ({"mask_id": 11}, r"mask_id must be in \[0, 11\), got 11"),
    ],
)
def test_a_mask_that_cannot_be_is_refused(change: Any, message: str) -> None:
    source = loaded(tiny_decoder(), TEXT)
    options = {"mask_id": 10, **change}
    with pytest.raises(ValueError, match=message):
        MaskedLM(source=source, seq_len=6, vocab=11, **options)


# Supervised learning


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, (0.5, 2.0, 1.0)])
def test_cross_entropy_is_that_of_torch(smoothing: float, weights: Any) -> None:
    logits = DRAW.normal(size=(7, 3)).astype(np.float32)
    labels = np.asarray([0, 2, -100, 1, 1, 0, 2])
    criterion = Classification(smoothing=smoothing, class_weights=weights)
    losses, mass = criterion(jnp.asarray(logits), jnp.asarray(labels, jnp.int32))
    want = functional.cross_entropy(
        torch.tensor(logits, dtype=torch.float64),
        torch.tensor(labels),
        weight=None if weights is None else torch.tensor(weights, dtype=torch.float64),
        label_smoothing=smoothing,
    )
    got = jnp.sum(losses * mass) / jnp.sum(mass)
    np.testing.assert_allclose(got, want.item(), rtol=RTOL["float32"])


@pytest.mark.parametrize("distance", ["squared", "absolute"])
def test_regression_is_the_mean_distance(distance: Any) -> None:
    logits, labels = DRAW.normal(size=(2, 4, 3)).astype(np.float32)
    losses, _ = Regression(distance=distance)(jnp.asarray(logits), jnp.asarray(labels))
    gap = logits.astype(np.float64) - labels
    want = (gap**2 if distance == "squared" else np.abs(gap)).mean(axis=1)
    np.testing.assert_allclose(losses, want, rtol=RTOL["float32"])


def test_smoothing_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\), got 1"):
        Classification(smoothing=1.0)


def batch_norm(dropout: float = 0.0) -> Supervised:
    model = Perceptron(norm=True, dropout=dropout)
    return Supervised(
        source=loaded(model, PIXELS),
        reads=READS,
        criterion=Classification(),
        collections=("batch_stats",),
    )


def test_a_model_with_batch_norm_trains() -> None:
    run = Run(batch_norm(), example=pixels(0), optimizer=optax.sgd(0.5))
    losses = [float(run.feed(pixels(1)).loss) for _ in range(20)]
    assert losses[-1] < losses[0] / 2


def test_running_averages_follow_every_accepted_microbatch() -> None:
    still = optax.set_to_zero()
    run = Run(batch_norm(), accumulation=2, example=pixels(0), optimizer=still)
    dense = jax.tree.map(np.float64, run.state.variables["params"]["Dense_0"])
    mean = np.asarray(run.state.variables["batch_stats"]["BatchNorm_0"]["mean"])
    for seed in (1, 2, 3):
        run.feed(pixels(seed), {**pixels(0), "pixels": jnp.full((4, 5), jnp.nan)})
        x = np.asarray(pixels(seed)["pixels"]) @ dense["kernel"] + dense["bias"]
        mean = 0.9 * mean + 0.1 * x.mean(axis=0)
    got = run.state.variables["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(got, mean, rtol=RTOL["float32"], atol=ACCUMULATION)


def test_a_collection_that_the_model_lacks_is_refused() -> None:
    objective = Supervised(
        source=loaded(Perceptron(), PIXELS),
        reads=READS,
        criterion=Classification(),
        collections=("batch_stats",),
    )
    with pytest.raises(ValueError, match=r"leaves nothing in .*\['batch_stats'\]"):
        Run(objective, example=pixels(0)).feed(pixels(0))


def test_dropout_follows_the_key_and_is_off_in_evaluation() -> None:
    objective = batch_norm(dropout=0.5)
    variables = objective.init(jax.random.key(0))
    loss = jax.jit(objective.loss)
    steps = [Step(jnp.int32(0), jax.random.key(i)) for i in (0, 0, 1)]
    totals = [float(loss(variables, pixels(1), step)[0].total) for step in steps]
    assert totals[0] == totals[1] != totals[2]
    scores = [objective.evaluate(variables, pixels(1), step) for step in steps[1:]]
    np.testing.assert_array_equal(scores[0].losses, scores[1].losses)


def test_metrics_count_the_examples_that_count() -> None:
    logits = jnp.asarray([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0], [0.0, 9.0]])
    labels, weights = jnp.asarray([0, 0, 0, 1]), jnp.asarray([1.0, 2.0, 1.0, 0.0])
    scores = LabelScores(logits, labels, jnp.asarray([1.0, 2.0, 3.0, 4.0]), weights)
    accuracy, loss = Accuracy(), MeanLoss()
    twice = accuracy.merge(accuracy(scores), accuracy(scores))
    assert accuracy.finalize(twice) == 2 / 3
    assert loss.finalize(loss.merge(loss(scores), loss(scores))) == 8 / 4


# Correlated views


def correlation_loss(a: np.ndarray, b: np.ndarray, redundancy: float) -> float:
    a, b = ((x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5) for x in (a, b))
    c = a.T @ b / len(a)
    on = np.diagonal(c)
    return ((1 - on) ** 2).sum() + redundancy * ((c**2).sum() - (on**2).sum())


def test_barlow_twins_is_its_definition() -> None:
    twins = BarlowTwins(source=loaded(Perceptron(), PIXELS), reads=READS)
    a, b = DRAW.normal(size=(2, 20, 3))
    count = jnp.float32(20)
    both = np.stack([a, b])
    sums = both.sum(axis=1), (both**2).sum(axis=1), a.T @ b
    moments = (jnp.asarray(x, jnp.float32) for x in sums)
    value, active = twins.reduce_loss(CrossMoments(count, *moments))
    np.testing.assert_allclose(
        value, correlation_loss(a, b, 0.005), rtol=RTOL["float32"]
    )
    assert active


def test_one_record_has_no_correlation() -> None:
    twins = BarlowTwins(source=loaded(Perceptron(), PIXELS), reads=READS)
    one = {"pixels": jnp.ones((2, 2, 5)), "loss_mask": jnp.asarray([True, False])}
    report = Run(twins, example=one).feed(one)
    assert (float(report.loss), bool(report.accepted)) == (0.0, True)
    assert not report.committed


# Joint-embedding prediction


def jepa(ema: EMASpec | None) -> JEPA:
    return JEPA(
        source=loaded(Encoder(), PATCHES),
        predictor=loaded(Guesser(), STATES),
        reads={"patches": jax.ShapeDtypeStruct((6, 3), jnp.float32)},
        seq=6,
        embed=6,
        width=2,
        ema=ema,
    )


SLOW = EMASpec(lambda n: 0.75, under("params", "context_encoder"))


def test_the_target_is_the_averaged_encoder() -> None:
    objective = jepa(SLOW)
    hidden = jnp.arange(6)[None] < jnp.asarray([2, 3, 2, 1])[:, None]
    x = jnp.asarray(DRAW.normal(size=(4, 6, 3)), jnp.float32)
    batch = {"patches": x, "hidden": hidden}
    run = Run(objective, example=batch, optimizer=optax.sgd(0.1))
    average = run.state.variables["params"]["context_encoder"]
    losses = []
    for _ in range(20):
        losses.append(float(run.feed(batch).loss))
        live = run.state.variables["params"]["context_encoder"]
        average = jax.tree.map(lambda a, w: 0.75 * a + 0.25 * w, average, live)
    assert set(run.state.ema["params"]) == {"context_encoder"}
    assert_trees_close(
        run.state.ema["params"]["context_encoder"],
        average,
        rtol=RTOL["float32"],
        atol=AVERAGE,
    )
    assert losses[-1] < losses[0]


def test_no_gradient_reaches_the_target_and_no_hidden_patch_the_context() -> None:
    objective = jepa(SLOW)
    variables = objective.init(jax.random.key(0))
    x = jnp.asarray(DRAW.normal(size=(1, 6, 3)), jnp.float32)
    hidden = jnp.asarray([[True, True, False, False, False, False]])

    def total(ema: Any, x: Any) -> Any:
        step = Step(jnp.int32(0), jax.random.key(0), ema)
        batch = {"patches": x, "hidden": hidden}
        return objective.loss(variables, batch, step)[0].total

    to_target, to_patches = jax.jit(jax.grad(total, (0, 1)))(variables, x)
    assert all(not jnp.any(leaf) for leaf in jax.tree.leaves(to_target))
    assert not jnp.any(to_patches[:, :2])
    assert jnp.all(to_patches[:, 2:])


def test_a_target_needs_an_average() -> None:
    with pytest.raises(ValueError, match=r"JEPA\.ema must not be None"):
        jepa(None)
    objective = jepa(SLOW)
    variables = objective.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"JEPA needs step\.ema"):
        objective.loss(variables, {}, Step(jnp.int32(0), jax.random.key(0)))


# The way out


@pytest.mark.parametrize("ema", [True, False])
def test_a_pipeline_publishes_averaged_or_live_weights(ema: bool) -> None:
    spec = EMASpec(lambda n: 0.5)
    objective = Supervised(
        source=loaded(Perceptron(), PIXELS),
        reads=READS,
        criterion=Classification(),
        ema=spec,
    )
    run = Run(objective, example=pixels(0))
    run.feed(pixels(1), pixels(2))
    task = objective.pipeline(run.state, ema=ema)
    assert isinstance(task, Scoring)
    want = run.state.averaged if ema else run.state.variables
    assert_trees_close(task.variables, want, rtol=0)
    logits = task.score({"pixels": pixels(3)["pixels"]}).logits
    assert logits is not None
    assert logits.shape == (4, 3)


def test_averaged_weights_of_a_run_without_an_average_are_refused() -> None:
    objective = batch_norm()
    run = Run(objective, example=pixels(0))
    with pytest.raises(ValueError, match="this run keeps no EMA; give ema=False"):
        objective.pipeline(run.state)


def test_variables_are_drawn_where_none_were_loaded() -> None:
    source = Source(model=Perceptron(norm=True))
    objective = Supervised(
        source=source,
        reads=READS,
        criterion=Classification(),
        param_dtype=jnp.bfloat16,
        trainable=under("params", "Dense_1"),
    )
    made = jax.eval_shape(objective.init, jax.random.key(0))
    dtypes = jax.tree.map(lambda leaf: str(leaf.dtype), made)
    assert set(made["params"]) == {"Dense_1"}
    assert set(made["frozen"]) == {"Dense_0", "BatchNorm_0"}
    assert dtypes["frozen"]["Dense_0"]["kernel"] == "bfloat16"
    assert dtypes["batch_stats"]["BatchNorm_0"]["mean"] == "float32"


def test_a_scanned_decoder_declares_its_stack() -> None:
    scanned = CausalLM(
        source=loaded(tiny_decoder(layers=2, scan=True), TEXT), seq_len=6
    )
    (site,) = scanned.bank_sites
    assert (site.namespace, site.view.names) == (("layers",), ("0", "1"))
    node = {"0": {"w": jnp.ones(3)}, "1": {"w": jnp.zeros(3)}}
    assert_trees_close(site.view.unstack(site.view.stack(node)), node, rtol=0)
    assert CausalLM(source=loaded(tiny_decoder(), TEXT), seq_len=6).bank_sites == ()


def test_a_bank_is_what_the_scan_runs_over_and_no_tree_of_the_run_adopts_it() -> None:
    runs = {}
    batch = {"tokens": jnp.asarray(DRAW.integers(0, 11, (4, 6)), jnp.int32)}
    for is_scanned in (True, False):
        source = loaded(tiny_decoder(layers=2, scan=is_scanned), TEXT)
        objective = CausalLM(source=source, seq_len=6, ema=EMASpec(lambda n: 0.5))
        run = runs[is_scanned] = Run(
            objective, example=batch, optimizer=optax.sgd(0.1, momentum=0.9)
        )
        run.feed(batch, batch)
    scanned, plain = (runs[key].state for key in (True, False))
    forms = [jax.tree.structure(state) for state in (scanned, plain)]
    assert forms[0] == forms[1]
    assert_trees_close(
        scanned.variables, plain.variables, rtol=RTOL["reordered"], atol=AVERAGE
    )
    # A snapshot by the declared view, of the trained weights, back and forth.
    objective = runs[True].objective
    (site,) = objective.bank_sites
    layers = scanned.variables["params"]["layers"]
    bank = site.view.stack(layers)
    for name, leaf in jax.tree_util.tree_leaves_with_path(bank):
        assert leaf.shape[0] == 2, name
    assert_trees_close(site.view.unstack(bank), layers, rtol=0)
    # The arrays over which the compiled loss scans have the bank's shapes.
    step = Step(jnp.int32(0), jax.random.key(0))
    traced = jax.make_jaxpr(objective.loss)(scanned.variables, batch, step)
    (scan,) = [e for e in traced.jaxpr.eqns if e.primitive.name == "scan"]
    carried = scan.params["num_consts"] + scan.params["num_carry"]
    shapes = sorted(v.aval.shape for v in scan.invars[carried:])
    wanted = sorted([*(leaf.shape for leaf in jax.tree.leaves(bank)), (2,)])
    assert shapes == wanted
