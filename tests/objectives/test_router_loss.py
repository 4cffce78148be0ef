"""The load-balancing loss of a mixture's routers, as transformers adds it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import dew
from dew.cli import main
from dew.nn.decoder import Decoder
from dew.objectives import CausalLM
from dew.objectives.base import AnyObjective, Step, scalar_loss
from dew.objectives.router_loss import RouterLossLM
from dew.tree import flatten
from tests.converters.families.decoders import TINY
from tests.support import hf_models as hf
from tests.support.tolerances import FAMILY_GRADIENT, RTOL

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss")
COEFFICIENT = 0.3


def mixture(family: str, folder: Path, **changes: Any) -> Path:
    """A folder whose config asks for the router loss."""
    tiny = TINY[family]
    fields = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return hf.save(
        hf.build(tiny.config(**{**tiny.fields, **fields, **changes})), folder
    )


def loss(objective: AnyObjective, batch: Any, variables: Any = None) -> Any:
    step = Step(jnp.int32(0), jax.random.key(1))
    own = objective.init(jax.random.key(0)) if variables is None else variables
    return scalar_loss(objective, own, batch, step)[0]


def batch(rows: int = 3, seq: int = 12, padding: int = 4) -> dict[str, np.ndarray]:
    mask = np.ones((rows, seq), bool)
    mask[0, seq - padding :] = False
    return {"tokens": hf.tokens(rows, seq).astype(np.int32), "mask": mask}


@pytest.mark.parametrize(
    ("family", "scan"),
    [
        ("mixtral", False),
        pytest.param("mixtral", True, marks=pytest.mark.full),
        ("qwen2_moe", False),
        *(pytest.param(f, False, marks=pytest.mark.full) for f in FAMILIES[2:]),
    ],
)
def test_loss_and_gradient_are_those_of_transformers(
    family: str, scan: bool, tmp_path: Path
) -> None:
    source = dew.load(mixture(family, tmp_path / "model"))
    assert isinstance(source.model, Decoder)
    if scan:
        source = replace(source, model=source.model.clone(scan=True))
    lm = CausalLM(source=source, seq_len=12)
    assert lm.router_coefficient == COEFFICIENT
    objective = RouterLossLM(lm=lm)
    arrays = {name: jnp.asarray(x) for name, x in batch().items()}
    variables = objective.init(jax.random.key(0))
    value, gradient = jax.value_and_grad(
        lambda tree: loss(objective, arrays, tree), allow_int=True
    )(variables)

    model = hf.reloaded(tmp_path / "model").train()
    ids, mask = (torch.tensor(np.array(x)) for x in batch().values())
    labels = ids.long().masked_fill(~mask, -100)
    want = model(input_ids=ids.long(), attention_mask=mask.long(), labels=labels).loss
    want.backward()
    np.testing.assert_allclose(value, want.item(), rtol=RTOL["float32"])
    table, leaves = source.table, flatten(gradient)
    routers = [name for name in table.sources if "router" in name or ".gate.w" in name]
    assert routers
    for name, parameter in model.named_parameters():
        if name in routers:
            (piece,) = table.sources[name]
            assert parameter.grad is not None
            np.testing.assert_allclose(
                leaves[piece.target], parameter.grad.numpy(), atol=FAMILY_GRADIENT
            )


def test_microbatches_pool_the_routers_sums(tmp_path: Path) -> None:
    source = dew.load(mixture("mixtral", tmp_path / "model"))
    objective = RouterLossLM(lm=CausalLM(source=source, seq_len=12))
    whole = batch(rows=4)
    parts = [{n: jnp.asarray(x[i : i + 2]) for n, x in whole.items()} for i in (0, 2)]
    step = Step(jnp.int32(0), jax.random.key(1))
    variables = objective.init(jax.random.key(0))
    stats = [objective.loss(variables, part, step)[0] for part in parts]
    pooled = objective.reduce_loss(jax.tree.map(jnp.add, *stats))[0]
    want = loss(objective, {n: jnp.asarray(x) for n, x in whole.items()}, variables)
    np.testing.assert_allclose(pooled, want, rtol=RTOL["float32"])


def test_it_can_be_left_out_and_is_never_left_out_in_silence(tmp_path: Path) -> None:
    folder = mixture("mixtral", tmp_path / "model")
    arrays = {name: jnp.asarray(x) for name, x in batch().items()}
    source = dew.load(folder)
    lm = CausalLM(source=source, seq_len=12)
    with pytest.raises(ValueError, match="RouterLossLM"):
        loss(lm, arrays)
    without = loss(CausalLM(source=source, seq_len=12, router_loss=0.0), arrays)
    assert loss(RouterLossLM(lm=lm), arrays) > without
    lowered = dew.load(folder, road="lowered")
    with pytest.raises(ValueError, match="--router-loss 0"):
        loss(CausalLM(source=lowered, seq_len=12), arrays)
    alone = loss(CausalLM(source=lowered, seq_len=12, router_loss=0.0), arrays)
    np.testing.assert_allclose(alone, without, rtol=RTOL["float32"])


def test_pretrain_says_that_it_trains_with_the_router_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = mixture("mixtral", tmp_path / "model")
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 " * 200)
    command = f"""pretrain --model {folder} --data {tmp_path / "text.txt"} --steps 1
    --batch-size 8 --seq-len 16 --json --out""".split()
    assert main([*command, str(tmp_path / "with")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"router loss with coefficient {COEFFICIENT}" in said
    assert main([*command, str(tmp_path / "without"), "--router-loss", "0"]) == 0
    assert "router loss" not in capsys.readouterr().err
