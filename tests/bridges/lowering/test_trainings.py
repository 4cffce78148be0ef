"""Lowered models of other kinds than causal ones, trained and exported."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import dew
from dew.bridges.names import flat_weights
from dew.converters.pretrained import Pretrained
from dew.objectives.base import Step
from dew.objectives.metrics import NatsPerToken
from examples import classify_digits, masked_smiles, seq2seq_t5
from examples.support.loop import split_rows, train
from tests.support import hf_models as hf
from tests.support.tolerances import ATOL, LOGITS, RTOL, ZOO_GRADIENT


def reloaded(kind: Any, folder: Path) -> Any:
    """The export in transformers, with nothing missing and nothing left over."""
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def test_the_loss_of_pairs_and_its_gradients_are_torchs(t5: Pretrained) -> None:
    objective = seq2seq_t5.objective(t5)
    batch = {n: jnp.asarray(x[:4]) for n, x in seq2seq_t5.couplings_as_arrays().items()}
    variables, step = (
        objective.init(jax.random.key(0)),
        Step(jnp.int32(0), jax.random.key(0)),
    )

    def loss(params: Any) -> jax.Array:
        stats, _ = objective.loss({**variables, "params": params}, batch, step)
        return stats.total / stats.mass

    value, gradients = jax.jit(jax.value_and_grad(loss))(variables["params"])
    model = reloaded(transformers.T5ForConditionalGeneration, t5.folder.path)
    given = {n: torch.tensor(np.array(x)).long() for n, x in batch.items()}
    want = model(given["tokens"], given["mask"], labels=given["labels"]).loss
    want.backward()
    np.testing.assert_allclose(value, want.item(), rtol=RTOL["float32"])
    ours = flat_weights({"params": gradients})
    theirs = {n: w.grad.numpy() for n, w in model.named_parameters()}
    assert set(ours) == set(theirs)
    scale = max(np.abs(gradient).max() for gradient in theirs.values())
    gap = max(np.abs(ours[n] - theirs[n]).max() for n in theirs) / scale
    assert gap < ZOO_GRADIENT


def test_a_t5_learns_and_loads_in_transformers(t5: Pretrained, tmp_path: Path) -> None:
    objective, data = seq2seq_t5.objective(t5), seq2seq_t5.couplings_as_arrays()
    split, nats = split_rows(data, every=6), {"nats": NatsPerToken()}
    state, watch = train(objective, split, nats, steps=6, rows=8, rate=0.01)
    assert watch.losses[-1] < 0.7 * watch.losses[0]
    task = objective.pipeline(state, ema=False)
    out = dew.save(task, tmp_path / "out")
    model = reloaded(transformers.T5ForConditionalGeneration, out)
    written = np.maximum(data["labels"][:2], 0)
    tokens, mask = data["tokens"][:2], data["mask"][:2]
    inputs = {"tokens": tokens, "mask": mask, "decoder_input_ids": written}
    got = np.asarray(task.score(inputs).logits)
    ids, seen, decoder = (torch.tensor(x).long() for x in inputs.values())
    with torch.no_grad():
        want = model(ids, seen, decoder_input_ids=decoder).logits.numpy()
    assert hf.largest_difference(got, want) < LOGITS


@pytest.mark.full
def test_a_real_albert_learns_and_loads_in_transformers(tmp_path: Path) -> None:
    before, after = masked_smiles.run(tmp_path, steps=30, rows=16)
    assert after < 0.6 * before
    model = reloaded(transformers.AlbertForMaskedLM, tmp_path / "export")
    source = dew.load(tmp_path / "export", road="lowered")
    batch = {n: x[:4] for n, x in masked_smiles.tokens_and_mask().items()}
    ids, mask = batch["tokens"], batch["mask"].astype(np.int32)
    got, want = source.logits(ids, mask), hf.torch_logits(model, ids, mask)
    assert hf.largest_difference(got, want) < LOGITS


@pytest.mark.full
def test_a_head_on_a_real_dinov2_learns_and_loads_in_transformers(
    tmp_path: Path,
) -> None:
    before, after = classify_digits.run(tmp_path)
    assert before < 0.3 < 0.7 < after
    kind = transformers.Dinov2ForImageClassification
    model = reloaded(kind, tmp_path / "export")
    _, held_out = split_rows(classify_digits.digits(), every=2)
    # What was measured in JAX is what the export does in torch.
    with torch.no_grad():
        logits = model(torch.tensor(held_out["pixel_values"])).logits.numpy()
    right = logits.argmax(-1) == held_out["labels"]
    assert right.mean() == pytest.approx(after, abs=ATOL["small float32"])
