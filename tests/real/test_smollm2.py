"""The promise on a real model: SmolLM2-135M against torch, tensor by tensor."""

import copy
import hashlib
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import dew
from dew.converters.folder.safetensors import read_header
from dew.converters.save import Export
from dew.objectives.base import Step, scalar_loss
from dew.objectives.causal_lm import CausalLM
from dew.training.optimizers import adamw
from examples.support.weights import cached
from tests.support.tolerances import ATOL, SMOLLM2

RATE, DECAY = 1e-4, 0.1


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> Any:
    return dew.load(smollm2)


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def ids(ours: Any) -> np.ndarray:
    """512 tokens of real text."""
    text = "\n\n".join(topics[name] for name in ("for", "with", "lambda", "class"))
    return np.array([ours.tokenizer.encode(text).ids[:512]], np.int32)


def test_logits_equal_torchs_over_real_text(
    ours: Any, theirs: Any, ids: np.ndarray
) -> None:
    with torch.inference_mode():
        want = theirs(torch.from_numpy(ids).long()).logits.numpy()
    assert np.abs(ours.logits(ids) - want).max() <= SMOLLM2["logits"]


@pytest.fixture(scope="module")
def gradients(ours: Any, theirs: Any, ids: np.ndarray) -> dict[str, Any]:
    """Loss and gradients of 96 tokens, torch's gradients in float64."""
    row = jnp.asarray(ids[:, :96])
    model = ours.model.clone(scan=True)
    objective = CausalLM(source=replace(ours, model=model), seq_len=96)
    step = Step(jnp.int32(0), jax.random.key(0))

    def loss(params: Any) -> Any:
        return scalar_loss(objective, {"params": params}, {"tokens": row}, step)[0]

    params = objective.init(jax.random.key(0))["params"]
    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    tokens = torch.from_numpy(ids[:, :96]).long()
    exact = copy.deepcopy(theirs).double()
    # Not the model's own loss, which rounds its logits to float32 again: torch's own
    # gradients in float32 are up to 3.4e-4 from these.
    cross_entropy(exact(tokens).logits[0, :-1], tokens[0, 1:]).backward()
    with torch.inference_mode():
        theirs_loss = theirs(tokens, labels=tokens).loss.item()
    return {
        "loss": (float(value), theirs_loss),
        "params": params,
        "gradient": gradient,
        "theirs": {name: p.grad for name, p in exact.named_parameters()},
    }


def in_torchs_names(source: Any, params: Any) -> dict[str, np.ndarray]:
    """Our tree as torch's tensors, by the table that exports go by."""
    export = Export(source=source, variables={"params": params})
    return {name: export.values(name) for name in export.specs}


def test_the_loss_equals_transformers(gradients: dict[str, Any]) -> None:
    got, want = gradients["loss"]
    assert got == pytest.approx(want, abs=ATOL["float32"])


def test_gradients_equal_autograds_tensor_by_tensor(
    ours: Any, gradients: dict[str, Any]
) -> None:
    mine = in_torchs_names(ours, gradients["gradient"])
    for name, want in gradients["theirs"].items():
        difference = np.linalg.norm(mine[name] - want.numpy())
        assert difference <= SMOLLM2["gradient"] * float(want.norm()), name


@pytest.mark.full
def test_one_adamw_step_equals_torchs(
    ours: Any, theirs: Any, gradients: dict[str, Any]
) -> None:
    """From the same gradients: Adam divides each by its size, so that rounding alone
    would turn the step of an entry whose gradient is all but zero."""
    optimizer = adamw(RATE, weight_decay=DECAY, clip_norm=1.0).transform
    params = {"params": gradients["params"]}
    updates, _ = jax.jit(optimizer.update)(
        {"params": gradients["gradient"]}, optimizer.init(params), params
    )
    moved: Any = optax.apply_updates(params, updates)
    mine = in_torchs_names(ours, moved["params"])
    step = in_torchs_names(ours, gradients["gradient"])
    for name, parameter in _torch_step(theirs, step).items():
        difference = np.abs(mine[name] - parameter).max()
        assert difference <= SMOLLM2["adamw"], name


def _torch_step(model: Any, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters after one step of torch's own optimizer."""
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        parameter.grad = torch.tensor(gradients[name])
    norms = [p for name, p in named.items() if "norm" in name]
    rest = [p for name, p in named.items() if "norm" not in name]
    groups = [{"params": rest}, {"params": norms, "weight_decay": 0.0}]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY).step()
    return {name: p.detach().numpy() for name, p in named.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_untouched_round_trip_keeps_every_bit(dtype: str, tmp_path: Path) -> None:
    folder = cached("smollm2", dtype=dtype)
    out = dew.save(dew.load(folder), tmp_path / "out")
    for file in folder.iterdir():
        assert _payload(out / file.name) == _payload(file), file.name


def _payload(file: Path) -> Any:
    """A side file's bytes; of a weight file each tensor's dtype, shape and digest."""
    if file.suffix != ".safetensors":
        return file.read_bytes()
    whole = np.memmap(file, np.uint8, "r")
    return {
        e.name: (e.dtype, e.shape, _digest(whole[e.start : e.end]))
        for e in read_header(file).entries
    }


def _digest(data: np.ndarray) -> str:
    return hashlib.sha256(data.data).hexdigest()
