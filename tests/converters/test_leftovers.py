"""Buffers that versions of transformers stored, beside the weights of a real folder."""

from pathlib import Path

import pytest
import torch

import dew
from dew.api import Road
from tests.converters.families.decoders import TINY
from tests.support import hf_models as hf

QUICK = (
    ("llama", "model.rotary_emb.inv_freq", (4,)),
    ("gpt2", "h.0.attn.masked_bias", ()),
    ("bert", "embeddings.position_ids", (1, 64)),
)
FULL = (
    ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", (4,)),
    ("llama", "model.layers.0.self_attn.rotary_emb.cos_cached", (1, 1, 8, 4)),
    ("llama", "model.layers.0.self_attn.rotary_emb.sin_cached", (1, 1, 8, 4)),
    ("gpt2", "transformer.h.0.attn.bias", (1, 1, 8, 8)),
    ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias", ()),
    ("gpt_neox", "gpt_neox.layers.0.attention.rotary_emb.inv_freq", (4,)),
    ("gptj", "transformer.h.0.attn.embed_positions", (8, 8)),
    ("bloom", "transformer.h.0.self_attention.masked_bias", ()),
    ("falcon", "transformer.rotary_emb.inv_freq", (4,)),
    ("opt", "model.decoder.version", ()),
    ("roberta", "roberta.embeddings.position_ids", (1, 64)),
    ("modernbert", "model.layers.0.attn.rotary_emb.inv_freq", (4,)),
    ("gemma3_text", "model.rotary_emb_local.inv_freq", (4,)),
)


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)],
)
@pytest.mark.parametrize(
    "road", ["native", pytest.param("lowered", marks=pytest.mark.full)]
)
def test_a_leftover_has_no_effect_and_stays_in_the_export(
    road: Road, family: str, name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tiny = TINY[family]
    model = hf.build(tiny.config(**tiny.fields), make=tiny.model)
    folder = hf.save(model, tmp_path / "plain")
    before = dew.load(folder, road=road)
    hf.edit_tensors(folder, {name: torch.full(shape, 7.0)})
    source = dew.load(folder, road=road)
    assert dict(source.variables).keys() == dict(before.variables).keys()
    ids = hf.tokens(seq=16) % 48
    assert (source.logits(ids) == before.logits(ids)).all()
    export = dew.save(source, tmp_path / "export")
    assert hf.load_file(export / "model.safetensors")[name].shape == shape
    certificate = dew.certify(export, road=road)
    assert certificate.passed, certificate.faults


def test_a_weight_that_the_model_does_not_have_is_still_refused(tmp_path: Path) -> None:
    folder = hf.save(hf.llama(), tmp_path / "model")
    hf.edit_tensors(folder, {"lm_head.bias": torch.ones(97)})
    with pytest.raises(ValueError, match=r"unexpected: lm_head\.bias"):
        dew.load(folder)
