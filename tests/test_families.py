"""Every family: transformers' logits and gradients, and its own bytes back."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dew
from dew.converters.families import FAMILIES
from tests import families_table, hf
from tests.families import TINY, Tiny
from tests.helpers import FAMILY_GRADIENT, LOGITS

SEQ = 48
LONG = 288


def model_of(tiny: Tiny, changes: Mapping[str, Any]) -> Any:
    """The random model of one config."""
    return hf.build(tiny.config(**{**tiny.fields, **changes}), make=tiny.model)


def padded(seq: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and a mask: a row without padding, one padded left, one padded right."""
    ids = hf.tokens(3, seq) % (hf.VOCAB - 1)
    mask = np.ones_like(ids)
    mask[1, : seq // 4] = 0
    mask[2, -seq // 4 :] = 0
    # RoBERTa's positions skip the token, and torch lets no gradient reach its row.
    ids[ids == pad] = pad + 1
    return np.where(mask, ids, pad), mask


def gradients(source: Any, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients of a sum of the real rows' logits, as the stored tensors lie."""
    weigh = weights(ids, mask)

    inputs = {"tokens": jnp.asarray(ids, jnp.int32), "mask": jnp.asarray(mask, bool)}

    def total(variables: Any) -> jax.Array:
        return jnp.sum(source.model.apply(variables, inputs).logits * weigh)

    grads = jax.grad(total)(source.variables)
    table = source.table

    def piece(part: Any) -> np.ndarray:
        leaf: Any = grads
        for name in part.target:
            leaf = leaf[name]
        leaf = np.asarray(leaf)
        return leaf if part.entry is None else np.take(leaf, part.entry, part.axis)

    return {name: table.write(name, piece) for name in table.sources}


def weights(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Weights of the logits in the sum, 0 on padding."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(*ids.shape, hf.VOCAB)).astype(np.float32) * mask[..., None]


def become_gradients(model: Any, ids: np.ndarray, mask: np.ndarray) -> None:
    """Sets torch's weights to their gradients of the same sum."""
    out = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits
    (out * torch.tensor(weights(ids, mask))).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)


def check_logits(model: Any, source: Any, seq: int) -> float:
    """The largest difference of the logits where there is no padding."""
    ids, mask = padded(seq, model.config.pad_token_id)
    real = mask.astype(bool)
    got = hf.logits_op_by_op(source, ids, mask)[real]
    return hf.largest_difference(got, hf.torch_logits(model, ids, mask)[real])


def check_round_trip(folder: Path, source: Any, out: Path) -> None:
    """Writes the folder again: the same bytes, and nothing that transformers lacks."""
    dew.save(source, out)
    before, after = (load_file(f / "model.safetensors") for f in (folder, out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.numpy().tobytes() == after[name].numpy().tobytes(), name
    hf.reloaded(out)


def check_gradients(model: Any, source: Any, folder: Path) -> float:
    """The largest difference of a gradient, as a part of the largest gradient."""
    ids, mask = padded(SEQ, model.config.pad_token_id)
    got = gradients(source, ids, mask)
    become_gradients(model, ids, mask)
    # Saved as weights are, the gradients get the names and shapes of the file.
    model.save_pretrained(folder)
    want = load_file(folder / "model.safetensors")
    assert got.keys() == want.keys()
    most = max(float(g.abs().max()) for g in want.values())
    return max(
        float(np.abs(got[name] - g.numpy()).max()) / most for name, g in want.items()
    )


def test_every_family_has_a_row() -> None:
    assert set(TINY) == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(TINY))
def test_logits_and_bytes_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    model = model_of(TINY[family], {})
    model.save_pretrained(tmp_path / "in")
    source = dew.load(tmp_path / "in")
    assert source.road == "native"
    assert check_logits(model, source, SEQ) < LOGITS
    check_round_trip(tmp_path / "in", source, tmp_path / "out")


DIFFERENTIATED = random.Random(1).sample(sorted(TINY), 8)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in DIFFERENTIATED else pytest.mark.full)
        for name in sorted(TINY)
    ],
)
def test_gradients_are_those_of_torch(family: str, tmp_path: Path) -> None:
    model = model_of(TINY[family], {})
    model.save_pretrained(tmp_path / "in")
    source = dew.load(tmp_path / "in")
    assert check_gradients(model, source, tmp_path / "grads") < FAMILY_GRADIENT


VARIANTS = [
    (family, i) for family in sorted(TINY) for i in range(len(TINY[family].variants))
]
SAMPLE = random.Random(0).sample(VARIANTS, 6)


def check_variant(family: str, i: int, folder: Path, seq: int) -> None:
    tiny = TINY[family]
    model = model_of(tiny, {**tiny.variants[i], **tiny.room(seq)})
    model.save_pretrained(folder / "in")
    source = dew.load(folder / "in")
    assert check_logits(model, source, seq) < LOGITS
    check_round_trip(folder / "in", source, folder / "out")


@pytest.mark.parametrize(("family", "i"), SAMPLE)
def test_a_sample_of_variants_has_the_logits_of_transformers(
    family: str, i: int, tmp_path: Path
) -> None:
    check_variant(family, i, tmp_path, SEQ)


@pytest.mark.full
@pytest.mark.parametrize(("family", "i"), VARIANTS)
def test_every_variant_has_the_logits_of_transformers(
    family: str, i: int, tmp_path: Path
) -> None:
    check_variant(family, i, tmp_path, LONG)


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(TINY))
def test_long_texts_have_the_logits_of_transformers(
    family: str, tmp_path: Path
) -> None:
    changes = TINY[family].room(LONG)
    model = model_of(TINY[family], changes)
    model.save_pretrained(tmp_path)
    assert check_logits(model, dew.load(tmp_path), LONG) < LOGITS


def test_the_table_of_the_docs_is_up_to_date() -> None:
    assert families_table.table() in families_table.PAGE.read_text(encoding="utf-8")
