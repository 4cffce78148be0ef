"""Replacement of one Markdown table in a page of the docs."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table with these column headers."""
    cells = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def read_table(page: Path, first_column: str) -> list[str]:
    """Returns the lines of the page's table whose first column has this header."""
    return _parts(page.read_text(encoding="utf-8"), first_column)[1]


def replaced_text(page: Path, lines: Sequence[str]) -> str:
    """Returns the page's text with these lines in place of the table so headed."""
    first_column = lines[0].split("|")[1].strip()
    before, _, after = _parts(page.read_text(encoding="utf-8"), first_column)
    return before + "\n".join(lines) + after


def write_table(page: Path, lines: Sequence[str]) -> None:
    """Writes a table over the one of the page that has the same first header."""
    page.write_text(replaced_text(page, lines), encoding="utf-8")


def _parts(text: str, first_column: str) -> tuple[str, list[str], str]:
    """The text before a table, the table's lines and the text after it."""
    start = text.index(f"| {first_column} |")
    body, blank, after = text[start:].partition("\n\n")
    if not blank:
        body, after = body.rstrip("\n"), ""
        blank = "\n"
    return text[:start], body.splitlines(), blank + after
