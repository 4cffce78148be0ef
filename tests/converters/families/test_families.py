"""Every family: transformers' logits, gradients, bfloat16 and bytes, over the grid."""

from pathlib import Path

import pytest

from dew.converters.families import FAMILIES
from docs.generate import families as families_table
from docs.generate import measured as families_measured
from docs.generate.page import read_table
from tests.converters.families.decoders import TINY
from tests.converters.families.grid import case_of_today, cases_of
from tests.converters.families.measure import measure
from tests.support.sampling import daily_sample


def test_every_family_has_a_row() -> None:
    assert set(TINY) == set(FAMILIES)


HALVED = daily_sample("bfloat16", TINY, 5)
"""The families whose seeded case is measured in bfloat16 too."""


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_seeded_case_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    half = family in HALVED
    assert not measure(
        family, case_of_today(family), tmp_path, jit=True, half=half
    ).faults


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(TINY))
def test_every_case_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    wrong = {
        case.name: faults
        for i, case in enumerate(cases_of(family))
        if (faults := measure(family, case, tmp_path / str(i)).faults)
    }
    assert not wrong


def test_the_tables_of_the_docs_are_up_to_date() -> None:
    table = families_table.table()
    assert table == read_table(families_table.PAGE, families_table.COLUMNS[0])
    assert set(families_measured.documented_rows()) == set(TINY)
