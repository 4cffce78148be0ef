"""Certificates of lowered models: every kind of input, through a folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

import dew
from dew.bridges.certificate.certify import certify
from dew.cli.load import tokenizer_of
from dew.converters.pretrained import Pretrained
from dew.tasks.seq2seq_generation import TargetGeneration, pad_right
from examples.support.reactions import couplings, smiles_tokenizer
from examples.support.weights import cached
from tests.bridges.lowering.zoo import ZOO, drawn
from tests.support import hf_models as hf
from tests.support.sampling import daily_sample
from tests.support.tolerances import LOGITS

WIDER = json.loads(
    (Path(__file__).parents[1] / "lowering" / "zoo_wider.json").read_text()
)
"""More architectures than the zoo has: class and settings of each."""

# Lengths compared, towers, boolean buffers, batch norms, no masks: each a fault once.
KINDS = {"mpt", "clip", "gpt_neo", "mobilenet_v2", "fnet"}
NEW = 12

# Beside them, two others each day; all under `full`. Left out: graphs of a minute.
SAMPLE = KINDS | daily_sample(
    "certificates", {*ZOO, *WIDER} - KINDS - {"gemma3n", "qwen3_next"}, 2
)


def build(name: str) -> Any:
    if name in ZOO:
        return ZOO[name].build()
    named, settings = WIDER[name]
    kind: Any = getattr(transformers, named)
    return drawn(kind, kind.config_class(**settings))


# Torch warns of MobileBERT's empty weights, and of states that RecurrentGemma keeps.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.filterwarnings("ignore:The tensor attributes self:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        n if n in SAMPLE else pytest.param(n, marks=pytest.mark.full)
        for n in sorted({*ZOO, *WIDER})
    ],
)
def test_a_folder_of_each_kind_is_certified(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    source = dew.load(tmp_path, road="lowered", dtype="float32")
    certificate = certify(source, tmp_path)
    assert certificate.passed, certificate.faults
    assert certificate.logits.positions > 0
    scale = certificate.logits.scale
    assert certificate.logits.largest_difference < LOGITS * scale


def test_the_docs_name_every_architecture_that_is_certified() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "bridges.md").read_text()
    assert [n for n in WIDER if f"`{n}`" not in page] == []


@pytest.fixture(scope="module")
def sources() -> list[str]:
    return [reactants for reactants, _ in couplings()[:3]]


def test_an_encoder_decoder_answers_as_torch_does(
    t5: Pretrained, sources: list[str]
) -> None:
    certificate = certify(t5, t5.folder.path, prompts=sources, new_tokens=NEW)
    assert certificate.passed, certificate.faults
    assert [c.prompt for c in certificate.continuations] == sources
    model: Any = transformers.T5ForConditionalGeneration.from_pretrained(t5.folder.path)
    task = TargetGeneration(t5, t5.variables, model.config.decoder_start_token_id)
    rows = [smiles_tokenizer(cached("albert")).encode(text).ids for text in sources]
    ours = task.write(pad_right(rows), max_new_tokens=NEW)
    for row, new in zip(rows, ours, strict=True):
        theirs = model.generate(torch.tensor([row]), max_new_tokens=NEW)
        assert new == theirs[0, 1:].tolist()
    written = [tokenizer_of(t5).decode(new) for new in ours]
    assert task.generate(sources, max_new_tokens=NEW) == written


def test_other_weights_than_the_folders_do_not_pass(
    t5: Pretrained, sources: list[str]
) -> None:
    moved = jax.tree.map(lambda x: x * np.float32(1.01), t5.variables)
    certificate = certify(replace(t5, variables=moved), t5.folder.path, prompts=sources)
    assert not certificate.passed
    assert any("logits differ by" in fault for fault in certificate.faults)


def test_tables_that_files_leave_out_are_recomputed(tmp_path: Path) -> None:
    model: Any = ZOO["marian"].build()
    model.save_pretrained(tmp_path / "source")
    source = dew.load(tmp_path / "source")
    out = dew.save(source, tmp_path / "out")
    assert "model.encoder.embed_positions.weight" not in source.table.sources
    kind: Any = transformers.MarianMTModel
    _, report = kind.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report


def test_images_of_other_sizes_are_compared_where_they_are_given(
    tmp_path: Path,
) -> None:
    model: Any = ZOO["dinov2"].build()
    model.save_pretrained(tmp_path)
    size = 2 * model.config.image_size
    shape = (1, model.config.num_channels, size, size)
    pixels = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    plain = dew.certify(tmp_path)
    wide = dew.certify(tmp_path, example_inputs={"pixel_values": pixels})
    assert plain.passed
    assert wide.passed
    assert wide.logits.positions > plain.logits.positions


def test_how_a_model_is_asked_to_write_is_no_part_of_it(tmp_path: Path) -> None:
    folder = hf.save(hf.llama(), tmp_path)
    asked = {"repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "num_beams": 2}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    certificate = dew.certify(folder, prompts=["w1 w2 w3"])
    assert certificate.passed, certificate.faults
    # Torch, asked so, writes something else.
    ids = torch.tensor([[1, 2, 3]])
    model: Any = hf.reloaded(folder)
    new = model.generate(ids, max_new_tokens=20)[0, 3:].tolist()
    written = [f"w{i}" for i in new]
    assert " ".join(written) != certificate.continuations[0].torch
