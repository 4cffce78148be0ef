"""Errors of the command line's syntax, in one line instead of a box of many."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator

from rich.console import Console

FRAME = re.compile(r"[╭╮╰╯│─]+")
"""What tyro draws around its messages."""

ASIDE = ("Argument helptext:", "For full helptext")
"""Sections of a message that repeat the help."""


def complain(fault: str) -> None:
    """Prints an error as one line on stderr."""
    message = f"dew: error: {' '.join(fault.split())}"
    Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Prints what a parser writes to stderr before it exits with 2 as one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as left:
        if left.code == 2:
            complain(_joined(said.getvalue()))
        else:
            sys.stderr.write(said.getvalue())
        raise


def _joined(box: str) -> str:
    """Returns the words of a box, without its title, frame and advice."""
    lines = box.strip().splitlines()
    if not lines or not FRAME.match(lines[0]):
        return box
    rows = [FRAME.sub("", line).strip() for line in lines[1:]]
    # A ruler leaves an empty row between two sections.
    sections = re.split(r"\n\n+", "\n".join(rows).strip())
    kept = [" ".join(s.split()) for s in sections if not s.startswith(ASIDE)]
    return f"{'; '.join(kept)}; see {_help(sections)}"


def _help(sections: list[str]) -> str:
    """Returns the command that prints the help which a message points to."""
    asked = re.search(r"dew[\w -]*--help", " ".join(" ".join(sections).split()))
    return asked.group() if asked else "dew --help"
