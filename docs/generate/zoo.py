"""The table of docs/results/zoo.md: architectures that lower, measured.

`python -m docs.generate.zoo [MODEL …]` measures these models, or all, and replaces
their rows. The page is written after each, so a run that was interrupted loses none.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tests import conftest as conftest
from tests.bridges.lowering.measure import Row, measure
from tests.bridges.lowering.zoo import ZOO, Entry

PAGE = Path(__file__).parents[1] / "results" / "zoo.md"
START = "| kind |"
COLUMNS = ("kind", "model", "class", "output", "gradient", "ops", "blocks", "split")
GROUPS = ("causal", "encoder", "encoder-decoder", "vision", "speech")


def rows() -> dict[str, str]:
    """Returns the rows of the page, by model."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition(START)
    lines = [line for line in table.splitlines()[2:] if line.startswith("| ")]
    return {line.split("|")[2].split()[0]: line for line in lines}


def start_of(name: str) -> str:
    """Returns the first columns of a row: group, model with its note, and class."""
    entry: Entry = ZOO[name]
    note = f" ({entry.notes})" if entry.notes else ""
    return f"| {entry.group} | {name}{note} | `{entry.model}` |"


def line(name: str, row: Row) -> str:
    """Returns one row of the table."""
    numbers = f"{row.output:.1e} | {row.gradient:.1e} | {row.num_ops}"
    split = "yes" if row.split else "no"
    return f"{start_of(name)} {numbers} | {row.num_blocks} | {split} |"


def write(names: Sequence[str]) -> None:
    """Measures models and replaces their rows, one after the other."""
    for name in names:
        lines = {n: row for n, row in rows().items() if n in ZOO}
        lines[name] = line(name, measure(ZOO[name]))
        before, _, _ = PAGE.read_text(encoding="utf-8").partition(START)
        head = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * 8)]
        ordered = sorted(lines, key=lambda n: (GROUPS.index(ZOO[n].group), n))
        body = "\n".join([*head, *(lines[n] for n in ordered)])
        PAGE.write_text(f"{before}{body}\n", encoding="utf-8")
        print(lines[name], flush=True)


if __name__ == "__main__":
    write(sys.argv[1:] or sorted(ZOO))
