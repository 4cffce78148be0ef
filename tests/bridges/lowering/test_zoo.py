"""Every model of the zoo in torch and in JAX: outputs, gradients, and the split."""

import json
from pathlib import Path

import pytest
import transformers

from dew.converters.families import FAMILIES
from docs.generate import zoo as zoo_page
from tests.bridges.lowering.measure import measure
from tests.bridges.lowering.zoo import ZOO
from tests.support.sampling import daily_sample
from tests.support.tolerances import ZOO_GRADIENT, ZOO_OUTPUT

WIDER = json.loads((Path(__file__).parent / "zoo_wider.json").read_text())

# A few rows in each run, without those whose graphs take a minute; all under `full`.
SAMPLE = daily_sample("zoo", set(ZOO) - {"gemma3n", "qwen3_next"}, 3)


@pytest.mark.parametrize(
    "name",
    [
        n if n in SAMPLE else pytest.param(n, marks=pytest.mark.full)
        for n in sorted(ZOO)
    ],
)
def test_a_model_and_its_gradients_are_torchs(name: str) -> None:
    entry = ZOO[name]
    row = measure(entry)
    assert row.output < ZOO_OUTPUT
    assert row.gradient < ZOO_GRADIENT
    assert row.split or entry.group not in ("causal", "encoder-decoder")


def test_the_page_has_a_row_for_each_model() -> None:
    rows = zoo_page.rows()
    assert set(rows) == set(ZOO)
    assert [
        n for n, row in rows.items() if not row.startswith(zoo_page.start_of(n))
    ] == []


def test_every_native_family_is_lowered_too() -> None:
    kinds = [getattr(transformers, entry.config) for entry in ZOO.values()]
    kinds += [getattr(transformers, named).config_class for named, _ in WIDER.values()]
    assert set(FAMILIES) - {kind.model_type for kind in kinds} == set()
