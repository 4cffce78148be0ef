"""Raw configs in the shapes of well-known checkpoints, against transformers."""

import zlib
from pathlib import Path

import pytest

import dew
from dew.converters.families import FAMILIES
from tests.corpus.shapes import shapes, shrunk
from tests.support import hf_models as hf
from tests.support.raw_folders import outputs, torch_outputs, write_raw
from tests.support.sampling import daily_sample
from tests.support.tolerances import LOGITS

SHAPES = shapes()
LOWERED = {"falcon: tiiuae/falcon-rw-1b"}
"""Those that the native road leaves to the lowered one: Falcon with ALiBi."""
QUICK = (
    "gemma: google/gemma-2b",
    "mistral: intfloat/e5-mistral-7b-instruct",
    "gpt2: openai-community/gpt2",
    *daily_sample("configs", SHAPES, 6),
)


def test_the_corpus_has_every_family() -> None:
    assert len(SHAPES) >= 120
    assert {name.partition(":")[0] for name in SHAPES} == set(FAMILIES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
        for name in SHAPES
    ],
)
def test_a_raw_config_means_what_it_means_to_transformers(
    name: str, tmp_path: Path
) -> None:
    raw = shrunk(SHAPES[name])
    model = write_raw(raw, tmp_path / "raw")
    source = dew.load(tmp_path / "raw")
    assert source.road == ("lowered" if name in LOWERED else "native")
    ids = hf.tokens(2, 24, zlib.crc32(name.encode()))
    want = torch_outputs(model, ids)
    assert hf.largest_difference(outputs(source, ids), want) < LOGITS
    # What transformers knows nothing of is carried along, byte by byte.
    export = dew.save(source, tmp_path / "export")
    config = "config.json"
    assert (export / config).read_bytes() == (tmp_path / "raw" / config).read_bytes()
