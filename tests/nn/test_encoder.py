"""Encoders: their heads, what they read beside tokens, what trains and cuts them."""

from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import dew
from dew.bridges.certificate.certify import certify
from dew.converters.families import FAMILIES
from dew.converters.surgery.prune_depth import prune_layers
from dew.objectives.base import Step
from dew.objectives.causal_lm import CausalLM
from dew.objectives.masked_lm import MaskedLM
from dew.training.optimizers import adamw
from dew.training.trainer import Trainer
from examples.support.weights import cached
from tests.converters.families.encoders import ENCODERS
from tests.converters.families.measure import check_round_trip
from tests.support import hf_models as hf
from tests.support.tolerances import FAMILY_GRADIENT, LOGITS, RTOL

CLASSES = [
    (family, name)
    for family in sorted(ENCODERS)
    for name in FAMILIES[family].architectures
    if not name.endswith("ForMaskedLM")
]


def tiny(family: str, name: str, **changes: Any) -> Any:
    """A random tiny model of one class."""
    row = ENCODERS[family]
    config = row.config(**{**row.fields, "num_labels": 3, **changes})
    return hf.build(config, make=getattr(transformers, name))


def padded(seq: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Three rows of tokens, the third padded right."""
    ids = hf.tokens(3, seq) % 90 + 4
    mask = np.ones_like(ids)
    mask[2, -5:] = 0
    return ids, mask


def torch_says(model: Any, ids: np.ndarray, mask: np.ndarray, **more: Any) -> Any:
    """All that transformers returns, with hidden states."""
    inputs = {name: torch.tensor(array) for name, array in more.items()}
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            output_hidden_states=True,
            **inputs,
        )


def we_say(source: Any, ids: np.ndarray, mask: np.ndarray, **more: Any) -> Any:
    """Our outputs, with the states of the first block and the last."""
    inputs = {"tokens": jnp.asarray(ids, jnp.int32), "mask": jnp.asarray(mask, bool)}
    more = {name: jnp.asarray(array, jnp.int32) for name, array in more.items()}
    return source.model.apply(source.variables, {**inputs, **more}, layers=(0, -1))


def differences(ours: Any, theirs: Any, mask: np.ndarray) -> dict[str, float]:
    """How far apart all are that both give, where there is no padding."""
    real = mask.astype(bool)
    pairs: dict[str, tuple[Any, Any]] = {
        "first": (ours.hidden[0][real], theirs.hidden_states[1][real]),
        "logits": (ours.logits, theirs.get("logits")),
        "pooled": (ours.pooled, theirs.get("pooler_output")),
        "final": (ours.final[real], theirs.get("last_hidden_state")),
    }
    found = {}
    for name, (got, want) in pairs.items():
        if want is not None:
            want = want[real] if name == "final" else want
            if want.shape[:2] == mask.shape:
                got, want = got[real], want[real]
            found[name] = hf.largest_difference(np.asarray(got), want.numpy())
    return found


@pytest.mark.parametrize(("family", "name"), CLASSES)
def test_every_class_says_what_torch_says(
    family: str, name: str, tmp_path: Path
) -> None:
    model = tiny(family, name)
    model.save_pretrained(tmp_path / "in")
    source = dew.load(tmp_path / "in", road="native")
    ids, mask = padded()
    theirs = torch_says(model, ids, mask)
    found = differences(we_say(source, ids, mask), theirs, mask)
    assert len(found) >= 2
    assert max(found.values()) < LOGITS, found
    check_round_trip(tmp_path / "in", source, tmp_path / "out")


def test_modernbert_can_mean_a_text(tmp_path: Path) -> None:
    name = "ModernBertForSequenceClassification"
    model = tiny("modernbert", name, classifier_pooling="mean")
    model.save_pretrained(tmp_path)
    ids, mask = padded()
    ours = we_say(dew.load(tmp_path), ids, mask)
    found = differences(ours, torch_says(model, ids, mask), mask)
    assert max(found.values()) < LOGITS, found


def test_kinds_of_tokens_and_positions_are_read(tmp_path: Path) -> None:
    model = tiny("bert", "BertModel")
    model.save_pretrained(tmp_path)
    ids, mask = padded()
    kinds, places = ids % 2, np.broadcast_to(np.arange(24)[::-1], ids.shape).copy()
    theirs = torch_says(model, ids, mask, token_type_ids=kinds, position_ids=places)
    ours = we_say(dew.load(tmp_path), ids, mask, token_type_ids=kinds, positions=places)
    assert max(differences(ours, theirs, mask).values()) < LOGITS


def test_packed_texts_do_not_see_each_other(tmp_path: Path) -> None:
    tiny("modernbert", "ModernBertForMaskedLM").save_pretrained(tmp_path)
    source = dew.load(tmp_path)
    ids = jnp.asarray(hf.tokens(1, 20), jnp.int32)
    inputs = {
        "tokens": ids,
        "segment_ids": jnp.asarray([[1] * 12 + [2] * 8]),
        "positions": jnp.asarray([[*range(12), *range(8)]]),
    }
    packed = source.model.apply(source.variables, inputs).logits[:, 12:]
    alone = source.logits(np.asarray(ids)[:, 12:])
    assert hf.largest_difference(np.asarray(packed), alone) < LOGITS


@pytest.mark.parametrize(
    "family", ["bert", pytest.param("albert", marks=pytest.mark.full)]
)
def test_loops_and_recomputed_blocks_say_the_same(family: str, tmp_path: Path) -> None:
    row = ENCODERS[family]
    hf.build(row.config(**row.fields), make=row.model).save_pretrained(tmp_path)
    source = dew.load(tmp_path)
    model: Any = source.model
    ids = jnp.asarray(hf.tokens(2, 16), jnp.int32)

    def slope(model: Any) -> Any:
        def total(variables: Any) -> jax.Array:
            return jnp.sum(jnp.sin(model.apply(variables, {"tokens": ids}).logits))

        return jax.tree.leaves(jax.jit(jax.grad(total))(source.variables))

    changed, plain = slope(model.clone(scan=True, remat="block")), slope(model)
    most = max(float(jnp.abs(leaf).max()) for leaf in plain)
    apart = [
        float(jnp.abs(got - want).max())
        for got, want in zip(changed, plain, strict=True)
    ]
    assert max(apart) / most < FAMILY_GRADIENT


def test_layers_that_share_weights_are_stored_once(tmp_path: Path) -> None:
    tiny("albert", "AlbertModel", num_hidden_groups=1).save_pretrained(tmp_path)
    source = dew.load(tmp_path)
    assert set(source.variables["params"]["layers"]) == {"0"}
    with pytest.raises(ValueError, match="blocks share their weights"):
        prune_layers(source, (0, 1), tmp_path / "cut")


OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def renamed(name: str) -> str:
    for new, old in OLD.items():
        name = name.replace(new, old)
    return name


def test_old_names_buffers_and_pretraining_heads_are_kept_as_they_are(
    tmp_path: Path,
) -> None:
    model = tiny("bert", "BertForMaskedLM")
    folder = tmp_path / "in"
    model.save_pretrained(folder)
    held = load_file(folder / "model.safetensors")
    decoder = held["bert.embeddings.word_embeddings.weight"].clone()
    more: Mapping[str, torch.Tensor] = {
        "bert.embeddings.position_ids": torch.arange(64)[None],
        "bert.pooler.dense.weight": torch.ones(32, 32),
        "bert.pooler.dense.bias": torch.ones(32),
        "cls.seq_relationship.weight": torch.ones(2, 32),
        "cls.seq_relationship.bias": torch.ones(2),
        "cls.predictions.decoder.weight": decoder,
        "cls.predictions.decoder.bias": held["cls.predictions.bias"].clone(),
    }
    old = {renamed(name): tensor for name, tensor in held.items()}
    hf.edit_tensors(folder, {**dict.fromkeys(held), **old, **more})
    source = dew.load(folder)
    ids, mask = padded()
    got = np.asarray(we_say(source, ids, mask).logits)[mask.astype(bool)]
    want = hf.torch_logits(model, ids, mask)[mask.astype(bool)]
    assert hf.largest_difference(got, want) < LOGITS
    dew.save(source, tmp_path / "out")
    before, after = (
        load_file(f / "model.safetensors") for f in (folder, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


CELLS = [
    # config says tied, what the file stores, what settles it, what comes of it
    (True, None, None, "tied"),
    (True, "copy", None, "tied"),
    (True, "other", None, "refused"),
    (True, "other", "stored", "untied"),
    (True, "other", "config", "tied"),
    (False, None, None, "refused"),
    (False, None, "stored", "tied"),
    (False, None, "config", "untied"),
    (False, "copy", None, "untied"),
    (False, "other", None, "untied"),
]


@pytest.mark.parametrize(("says", "stored", "settled", "outcome"), CELLS)
def test_every_cell_of_tied_heads(
    says: bool, stored: str | None, settled: Any, outcome: str, tmp_path: Path
) -> None:
    tiny("bert", "BertForMaskedLM").save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    table = held["bert.embeddings.word_embeddings.weight"]
    copy = table.clone() if stored == "copy" else table + 1
    bias = held["cls.predictions.bias"].clone()
    if stored is not None:
        decoder = "cls.predictions.decoder."
        hf.edit_tensors(tmp_path, {decoder + "weight": copy, decoder + "bias": bias})
    hf.edit_config(tmp_path, tie_word_embeddings=says)
    if outcome == "refused":
        with pytest.raises(ValueError, match=r"cls\.predictions\.decoder\.weight"):
            dew.load(tmp_path)
        return
    source = dew.load(tmp_path, tied=settled)
    name = "vocab_own" if outcome == "untied" else "vocab_tied"
    assert name in source.variables["params"]["head"]


def test_an_untied_head_reads_its_own_table_and_bias(tmp_path: Path) -> None:
    model = tiny("bert", "BertForMaskedLM", tie_word_embeddings=False)
    with torch.no_grad():
        model.cls.predictions.bias.add_(1.0)
    model.save_pretrained(tmp_path / "in")
    source = dew.load(tmp_path / "in")
    ids, mask = padded()
    got = np.asarray(we_say(source, ids, mask).logits)
    assert hf.largest_difference(got, hf.torch_logits(model, ids, mask)) < LOGITS
    dew.save(source, tmp_path / "out", hf.shaken(source.variables))
    hf.reloaded(tmp_path / "out")


def test_a_class_that_is_not_native_is_refused_by_name(tmp_path: Path) -> None:
    tiny("bert", "BertForQuestionAnswering").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="architectures must be one of BertForMasked"):
        dew.load(tmp_path, road="native")


def test_states_without_a_head_are_no_logits(tmp_path: Path) -> None:
    tiny("bert", "BertModel").save_pretrained(tmp_path)
    source = dew.load(tmp_path)
    with pytest.raises(ValueError, match="has no head that scores"):
        source.logits(hf.tokens())
    with pytest.raises(ValueError, match="unembed needs a readout"):
        source.model.apply(source.variables, jnp.zeros((1, 2, 32)), method="unembed")


def objective(source: Any, seq: int = 16) -> MaskedLM:
    return MaskedLM(source=source, seq_len=seq, vocab=hf.VOCAB, mask_id=4)


def test_a_masked_models_loss_is_that_of_transformers(tmp_path: Path) -> None:
    model = tiny("electra", "ElectraForMaskedLM")
    model.save_pretrained(tmp_path)
    source = dew.load(tmp_path)
    ids, mask = padded(16)
    labels = np.where(ids % 5 == 0, ids, -100)
    batch = {"tokens": ids, "mask": mask, "labels": labels}
    batch = {name: jnp.asarray(array, jnp.int32) for name, array in batch.items()}
    step = Step(jnp.int32(0), jax.random.key(0))
    stats, _, said = objective(source).predict(
        source.variables, batch, step, train=False, layers=(0, -1)
    )
    with torch.no_grad():
        want = model(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            labels=torch.tensor(labels),
        ).loss.item()
    assert float(stats.total / stats.mass) == pytest.approx(want, rel=RTOL["float32"])
    assert [state.shape for state in said.hidden] == [(3, 16, 32)] * 2


def test_a_native_encoder_trains_and_its_export_is_certified(tmp_path: Path) -> None:
    hf.save(tiny("bert", "BertForMaskedLM"), tmp_path / "in")
    source = dew.load(tmp_path / "in")
    task = objective(source)
    # One text, so that a token's place says what it is.
    ids = np.repeat(hf.tokens(1, 16, seed=3), 8, axis=0).astype(np.int32)
    batch = {"tokens": jnp.asarray(ids)}

    def loss(variables: Any) -> float:
        step = Step(jnp.int32(0), jax.random.key(9))
        stats = task.predict(variables, batch, step, train=False)[0]
        return float(stats.total / stats.mass)

    before = loss(source.variables)
    trainer = Trainer(task, adamw(1e-2), key=jax.random.key(0))
    state = trainer.fit(({"tokens": ids} for _ in range(30)), steps=30)
    assert loss(state.variables) < 0.7 * before
    dew.save(task.pipeline(state, ema=False), tmp_path / "out")
    certificate = certify(dew.load(tmp_path / "out"), tmp_path / "out")
    assert certificate.passed, certificate.faults
    assert certificate.architecture == "BertForMaskedLM"


def test_an_encoder_is_no_causal_model(tmp_path: Path) -> None:
    tiny("bert", "BertForMaskedLM").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must see no later tokens"):
        CausalLM(source=dew.load(tmp_path), seq_len=8)


def test_blocks_are_cut_from_an_encoder(tmp_path: Path) -> None:
    model = tiny("distilbert", "DistilBertForMaskedLM", n_layers=3)
    model.save_pretrained(tmp_path / "in")
    folder = prune_layers(dew.load(tmp_path / "in"), (0, 2), tmp_path / "out")
    ids, mask = padded()
    del model.distilbert.transformer.layer[1]
    got = np.asarray(we_say(dew.load(folder), ids, mask).logits)
    assert hf.largest_difference(got, hf.torch_logits(model, ids, mask)) < LOGITS
    hf.reloaded(folder)


def test_a_block_is_not_cut_to_where_it_would_be_another(tmp_path: Path) -> None:
    tiny("modernbert", "ModernBertModel").save_pretrained(tmp_path / "in")
    with pytest.raises(ValueError, match="block 1 would be of another kind as block 0"):
        prune_layers(dew.load(tmp_path / "in"), (1, 2), tmp_path / "out")


TEXT = " ".join(topics["for"].split())


def test_a_real_minilm_has_torchs_states_natively() -> None:
    folder = cached("minilm")
    source = dew.load(folder)
    assert source.road == "native"
    tokenizer: Any = source.tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = np.array([tokenizer.encode(TEXT).ids[:256]])
    mask = np.ones_like(ids)
    mask[:, -9:] = 0
    model = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    theirs = torch_says(model, ids, mask)
    found = differences(we_say(source, ids, mask), theirs, mask)
    assert set(found) == {"first", "pooled", "final"}
    assert max(found.values()) < LOGITS, found


def test_a_real_albert_has_torchs_scores_natively(tmp_path: Path) -> None:
    folder = cached("albert")
    source = dew.load(folder)
    assert source.road == "native"
    ids = np.random.default_rng(0).integers(5, 591, (2, 128))
    mask = np.ones_like(ids)
    mask[1, -40:] = 0
    model = transformers.AlbertForMaskedLM.from_pretrained(folder).eval()
    found = differences(we_say(source, ids, mask), torch_says(model, ids, mask), mask)
    assert set(found) == {"first", "logits"}
    assert max(found.values()) < LOGITS, found
