"""Adapters beside linear maps: what they compute, and that nothing else is trained."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dew
from dew.converters.lora.adapters import Adapted
from dew.nn.linear import FACTORS, LORA, Linear
from dew.nn.lora import Adapter, Site, merge_adapters, with_adapters
from dew.objectives.base import Step, scalar_loss
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.objective import Distillation
from dew.objectives.distillation.variables import TEACHER
from dew.objectives.masked_lm import MaskedLM
from dew.training.checkpoint import Checkpoints
from dew.training.optimizers import adamw
from dew.training.trainer import Trainer
from dew.tree import FROZEN, flatten, unflatten
from tests.support import hf_models as hf
from tests.support.runs import Losses, Rows
from tests.support.tolerances import ATOL, RTOL

KEY = jax.random.key(0)
STEP = Step(jnp.int32(0), KEY)


def linear(dropout: float = 0.0) -> Any:
    """A map of [2, 3] inputs to [2, 2] outputs with a drawn adapter of rank 2."""
    site = Site(path=("params",), outputs=(2, 2), inputs=(2, 3))
    adapter = Adapter(site=site, rank=2, scale=1.5, dropout=dropout)
    model = Linear((2, 3), (2, 2), bias=True)
    variables = model.init(KEY, jnp.zeros((1, 2, 3)))
    variables = with_adapters(variables, [adapter], KEY)
    b = jax.random.normal(KEY, (2, 2, 2))
    return model, {**variables, "params": {**variables["params"], "lora_b": b}}


def test_an_adapter_adds_its_product_to_that_of_the_weight() -> None:
    model, variables = linear()
    x = np.random.default_rng(0).normal(size=(5, 2, 3))
    p = {name: np.asarray(v, np.float64) for name, v in variables["params"].items()}
    low = np.einsum("nij,rij->nr", x, p["lora_a"])
    want = np.einsum("nij,opij->nop", x, p["weight"]) + p["bias"]
    want = want + 1.5 * np.einsum("nr,opr->nop", low, p["lora_b"])
    got = model.apply(variables, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(
        got, want, rtol=RTOL["float32"], atol=ATOL["small float32"]
    )


def test_a_merged_weight_says_the_same() -> None:
    model, variables = linear()
    x = jax.random.normal(KEY, (5, 2, 3))
    whole = merge_adapters(variables)
    assert set(whole["params"]) == {"weight", "bias"}
    want = model.apply(variables, x)
    np.testing.assert_allclose(
        model.apply(whole, x), want, rtol=RTOL["reordered"], atol=ATOL["small float32"]
    )


def test_dropout_of_the_input_keeps_or_doubles_each_number() -> None:
    model = Linear((400,), (400,))
    eye = jnp.eye(400)
    settings = {"scale": jnp.float32(1), "dropout": jnp.float32(0.5)}
    params = {"weight": 0 * eye, "lora_a": eye, "lora_b": eye}
    variables = {"params": params, LORA: settings}
    x = jnp.ones((1, 400))
    got = np.asarray(model.apply(variables, x, rngs={"dropout": KEY}))
    assert set(np.unique(got)) == {0.0, 2.0}
    # Five standard deviations of 400 coins.
    assert abs(got.mean() - 1) < 0.25
    np.testing.assert_array_equal(model.apply(variables, x), x)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return dew.load(hf.save(hf.llama(), tmp_path_factory.mktemp("base")))


def lora(base: Any, **settings: Any) -> Adapted:
    return dew.adapt(base, dew.Lora(**{"rank": 2, **settings}), key=KEY)


def moved(source: Adapted, seed: int = 0) -> Adapted:
    """The adapter after some training."""
    leaves = flatten(source.variables)
    draw = np.random.default_rng(seed)
    for path, leaf in leaves.items():
        if path[-1] in FACTORS:
            noise = draw.normal(0, 0.2, leaf.shape)
            leaves[path] = leaf + jnp.asarray(noise, leaf.dtype)
    return replace(source, variables=unflatten(leaves))


def test_a_new_adapter_changes_no_logit_and_shares_the_base(base: Any) -> None:
    source = lora(base)
    ids = hf.tokens()
    want = hf.logits_op_by_op(base, ids)
    np.testing.assert_array_equal(hf.logits_op_by_op(source, ids), want)
    ours = flatten(source.variables)
    assert all(ours[path] is leaf for path, leaf in flatten(base.variables).items())


@pytest.mark.parametrize("remat", ["none", "block"])
def test_scanned_blocks_with_adapters_say_what_unrolled_ones_do(
    base: Any, remat: str
) -> None:
    source = moved(lora(base))
    inputs = {"tokens": jnp.asarray(hf.tokens(1, 8), jnp.int32)}
    want = source.model.apply(source.variables, inputs).logits
    model: Any = source.model
    scanned = model.clone(scan=True, remat=remat)
    got = scanned.apply(source.variables, inputs).logits
    np.testing.assert_allclose(got, want, rtol=RTOL["float32"], atol=ATOL["float32"])


def test_a_scan_over_layers_that_differ_is_refused(base: Any) -> None:
    model: Any = base.model
    scanned = replace(base, model=model.clone(scan=True))
    with pytest.raises(ValueError, match=r"same adapters in every layer.*unrolled"):
        lora(scanned, targets=r"model\.layers\.0\.self_attn\.q_proj")


class Same(Rows):
    """One batch of the tiny Llama's tokens, again and again."""

    def __next__(self) -> dict[str, Any]:
        super().__next__()
        return {"tokens": hf.tokens(8, 12).astype(np.int32)}


def run(base: Any, folder: Path, steps: int, *, resume: bool = False) -> Any:
    source = lora(base, dropout=0.1)
    objective = CausalLM(source=source, seq_len=12, trainable=source.is_trained)
    seen, kept = Losses(), Checkpoints(folder, every=1)
    trainer = Trainer(
        objective, adamw(1e-2), key=KEY, checkpoints=kept, callbacks=[seen]
    )
    state = trainer.fit(Same(), steps=steps, resume=resume)
    return state, seen.losses, kept


@pytest.fixture(scope="module")
def trained(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(base, tmp_path_factory.mktemp("run"), 3)


def test_only_the_adapter_is_trained(base: Any, trained: Any) -> None:
    state, losses, _ = trained
    assert losses[-1] < losses[0]
    live = flatten(state.variables["params"])
    assert {path[-1] for path in live} == set(FACTORS)
    for path, leaf in flatten(base.variables["params"]).items():
        np.testing.assert_array_equal(flatten(state.variables[FROZEN])[path], leaf)
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer))
    assert moments <= 2 * sum(leaf.size for leaf in live.values()) + 8


def test_a_checkpoint_is_as_large_as_the_adapter(trained: Any) -> None:
    state, _, kept = trained
    folder = kept.folder / str(kept.latest())
    meta = json.loads((folder / "meta" / "metadata").read_text())
    live = sum(leaf.nbytes for leaf in flatten(state.variables["params"]).values())
    frozen = sum(leaf.nbytes for leaf in flatten(state.variables[FROZEN]).values())
    assert not [name for name in meta["leaves"] if "frozen" in name]
    held = [n for n in meta["leaves"] if n.startswith(("variables", "optimizer"))]
    sizes = {name: np.prod(_shape(meta["leaves"][name])) * 4 for name in held}
    scales = 2 * 4 * len(flatten(state.variables[LORA]))
    assert sum(sizes.values()) <= 3 * live + scales + 8
    assert live < frozen / 5


def _shape(kind: str) -> list[int]:
    """The sizes in a leaf's kind, as in float32[2,3]."""
    inside = kind.partition("[")[2].removesuffix("]")
    return [int(size) for size in inside.split(",") if size]


def test_a_run_of_an_adapter_resumes_with_equal_losses(
    base: Any, trained: Any, tmp_path: Path
) -> None:
    _, whole, _ = trained
    _, first, _ = run(base, tmp_path, 2)
    state, rest, _ = run(base, tmp_path, 3, resume=True)
    assert first + rest == whole
    for path, leaf in flatten(trained[0].variables).items():
        np.testing.assert_array_equal(flatten(state.variables)[path], leaf)


@pytest.mark.full
def test_the_base_as_teacher_shares_every_weight(base: Any) -> None:
    source = moved(lora(base))
    student = CausalLM(source=source, seq_len=12, trainable=source.is_trained)
    teacher = CausalLM(source=base, seq_len=12)
    objective = Distillation(student=student, teacher=teacher, measures=())
    variables = objective.init(KEY)
    assert not flatten(variables.get(TEACHER, {}))
    frozen = flatten({"params": variables[FROZEN]})
    teaching = flatten(objective.teacher_variables(variables, 0))
    assert teaching.keys() == flatten(base.variables).keys()
    assert all(leaf is frozen[path] for path, leaf in teaching.items())
    apart = Distillation(
        student=student,
        teacher=CausalLM(source=replace(base, variables=copied(base)), seq_len=12),
        measures=(),
    )
    batch = {"tokens": jnp.asarray(hf.tokens(2, 12), jnp.int32)}
    got, want = (
        scalar_loss(one, one.init(KEY), batch, STEP)[0] for one in (objective, apart)
    )
    assert want > 0.01
    np.testing.assert_array_equal(got, want)


def copied(base: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + 0, base.variables)


@pytest.mark.full
def test_masked_models_train_adapters_too(base: Any) -> None:
    source = lora(base)
    objective = MaskedLM(
        source=source,
        seq_len=12,
        vocab=hf.VOCAB,
        mask_id=1,
        trainable=source.is_trained,
    )
    variables = objective.init(KEY)
    batch = {"tokens": jnp.asarray(hf.tokens(2, 12), jnp.int32)}

    def loss(params: Any) -> Any:
        return scalar_loss(objective, {**variables, "params": params}, batch, STEP)[0]

    gradient = flatten(jax.grad(loss)(variables["params"]))
    assert {path[-1] for path in gradient} == set(FACTORS)
    # B starts at zero, so the first gradient of A is zero and that of B is not.
    size = {name: 0.0 for name in FACTORS}
    for path, leaf in gradient.items():
        size[path[-1]] += float(jnp.abs(leaf).sum())
    assert size["lora_a"] == 0 < size["lora_b"]
