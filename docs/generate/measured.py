"""Measured table of native families in docs/results/families.md.

`python -m docs.generate.measured [FAMILY …]` measures every case of the families
named, or of all families, and rewrites their rows.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from docs.generate.families import PAGE
from docs.generate.page import read_table, table_lines, write_table
from tests import conftest as conftest
from tests.converters.families.decoders import TINY
from tests.converters.families.grid import Case, cases_of
from tests.converters.families.measure import Differences, measure

COLUMNS = ("measured", "cases", "logits", "gradients", "bfloat16", "bytes")


def documented_rows() -> dict[str, Sequence[str]]:
    """Returns the cells of each row that the page has now, by family."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in read_table(PAGE, COLUMNS[0])[2:]
    ]
    return {row[0].strip("`"): row for row in rows}


def measured_row(family: str) -> Sequence[str]:
    """Measures all cases of a family; prints every difference over its bound."""
    largest, cases, passed = Differences(), cases_of(family), 0
    start = time.monotonic()
    for case in cases:
        differences = measure_case(family, case)
        if differences is not None:
            largest, passed = largest.with_larger(differences), passed + 1
    print(f"{family}: {time.monotonic() - start:.0f} s", flush=True)
    return (
        f"`{family}`",
        str(len(cases)),
        f"{largest.logits:.1e}",
        f"{largest.gradient:.1e}",
        f"{largest.half:.2f}",
        f"{passed} of {len(cases)}",
    )


def measure_case(family: str, case: Case) -> Differences | None:
    """Measures one case; None if it raises, with the error printed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            differences = measure(family, case, Path(folder))
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            print(f"{family}, {case.name}: {error!r}", flush=True)
            return None
    for fault in differences.faults:
        print(f"{family}, {case.name}: {fault}", flush=True)
    return differences


def write_rows(families: Sequence[str]) -> None:
    """Measures these families and writes each row as soon as it is there."""
    for family in families:
        rows = {**documented_rows(), family: measured_row(family)}
        write_table(PAGE, table_lines(COLUMNS, [rows[name] for name in sorted(rows)]))


if __name__ == "__main__":
    write_rows(sys.argv[1:] or sorted(TINY))
