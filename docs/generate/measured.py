"""The measured table of docs/results/families.md.

`python -m docs.generate.measured [FAMILY …]` measures every case of these families, or
of all, and writes their rows anew.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from docs.generate.families import PAGE
from tests import conftest as conftest
from tests.converters.families.decoders import TINY
from tests.converters.families.grid import Case, cases_of
from tests.converters.families.measure import Found, measure

START = "| measured |"
COLUMNS = ("measured", "cases", "logits", "gradients", "bfloat16", "bytes")


def rows() -> dict[str, str]:
    """The rows that the page has, by family."""
    lines = PAGE.read_text(encoding="utf-8").partition(START)[2].partition("\n\n")[0]
    return {
        line.split("`")[1]: line
        for line in lines.splitlines()
        if line.startswith("| `")
    }


def row(family: str) -> str:
    """Measures a family; prints what is over its bound."""
    largest, cases, same = Found(), cases_of(family), 0
    began = time.monotonic()
    for case in cases:
        found = attempt(family, case)
        if found is not None:
            largest, same = largest.with_larger(found), same + 1
    print(f"{family}: {time.monotonic() - began:.0f} s", flush=True)
    numbers = f"{largest.logits:.1e} | {largest.gradient:.1e} | {largest.half:.2f}"
    return f"| `{family}` | {len(cases)} | {numbers} | {same} of {len(cases)} |"


def attempt(family: str, case: Case) -> Found | None:
    """Measures one case; None where it fails altogether."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measure(family, case, Path(folder))
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            print(f"{family}, {case.name}: {error!r}", flush=True)
            return None
    for fault in found.faults:
        print(f"{family}, {case.name}: {fault}", flush=True)
    return found


def write(families: Sequence[str]) -> None:
    """Writes the rows of these families anew."""
    for family in families:
        new = {**rows(), family: row(family)}
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(START)
        lines = [COLUMNS, ("---",) * len(COLUMNS)]
        head = [f"| {' | '.join(line)} |" for line in lines]
        body = [new[name] for name in sorted(new)]
        after = rest.partition("\n\n")[2]
        PAGE.write_text(before + "\n".join([*head, *body]) + "\n\n" + after, "utf-8")


if __name__ == "__main__":
    write(sys.argv[1:] or sorted(TINY))
