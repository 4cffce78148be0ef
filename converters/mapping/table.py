"""Every stored tensor and every variable of one model: what rules and a model make.

A table reads variables out of stored tensors and writes them back. Rules become one in
`dew.converters.mapping.build`; a lowered model's is plain.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dew.converters.errors import brief
from dew.converters.mapping.layout import Layout
from dew.converters.mapping.rules import template_pattern
from dew.typing import Path

Index = tuple[slice, ...]
"""The part of a variable that one device holds."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One stored tensor's part in one variable.

    `entry` is the place on the variable's `axis` that the tensor fills, None where it
    fills all. `start` and `stop` bound its run on a shared axis of `total`. `window` is
    the part of the variable, or of that entry, that the tensor fills; None is all.
    """

    source: str
    target: Path
    layout: Layout
    sizes: Mapping[str, int]
    entry: int | None = None
    axis: int = 0
    start: int = 0
    stop: int = 0
    total: int = 0
    window: Index | None = None

    def read(self, stored: np.ndarray) -> np.ndarray:
        """Returns this variable's part of the stored tensor; a view where it can be."""
        shared = self.layout.shared_axis
        if shared is not None:
            outer = math.prod(self.sizes[name] for name in self.layout.outer)
            shape = stored.shape
            stored = stored.reshape(
                *shape[:shared], outer, self.total, *shape[shared + 1 :]
            )
            run = slice(self.start, self.stop)
            stored = stored[(slice(None),) * (shared + 1) + (run,)]
        return self.layout.to_variable(stored, self.sizes)

    def take(self, variable: np.ndarray, *, whole: bool) -> np.ndarray:
        """Returns the block of the stored tensor that the variable gives back.

        `whole` says that the variable is all of it and not this piece's entry.
        """
        if whole and self.entry is not None:
            variable = variable[(slice(None),) * self.axis + (self.entry,)]
        if self.window is not None:
            variable = variable[self.window]
        return self.layout.to_block(variable, self.sizes)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Every stored tensor and every variable of one model, and how they meet.

    `shapes` are those of the stored tensors; `copies` name stored tensors that repeat
    a variable another one gives.
    """

    sources: Mapping[str, tuple[Piece, ...]]
    targets: Mapping[Path, tuple[Piece, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    variables: Mapping[Path, tuple[int, ...]]
    copies: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()

    @cached_property
    def _ignored_patterns(self) -> list[re.Pattern[str]]:
        return [template_pattern(name) for name in self.ignored]

    def ignores(self, name: str) -> bool:
        """Whether the stored tensor is known to mean nothing."""
        return any(p.fullmatch(name) for p in self._ignored_patterns)

    def read(
        self, target: Path, stored: Callable[[str], np.ndarray], index: Index
    ) -> np.ndarray:
        """Returns the part `index` of a variable, looking only at what it needs."""
        pieces = self.targets[target]
        # With the dots a variable without axes stays an array.
        if pieces[0].window is not None:
            return self._joined(target, stored)[*index, ...]
        if pieces[0].entry is None:
            return pieces[0].read(stored(pieces[0].source))[*index, ...]
        axis = pieces[0].axis
        rest = index[:axis] + index[axis + 1 :]
        chosen = pieces[index[axis]] if index else pieces
        parts = [piece.read(stored(piece.source))[rest] for piece in chosen]
        return np.stack(parts, axis=axis)

    def _joined(self, target: Path, stored: Callable[[str], np.ndarray]) -> np.ndarray:
        """Returns a variable of which each stored tensor fills a window."""
        pieces = self.targets[target]
        first = stored(pieces[0].source)
        whole = np.empty(self.variables[target], first.dtype)
        for piece in pieces:
            at = (slice(None),) * piece.axis + (piece.entry,)
            part = whole if piece.entry is None else whole[at]
            part[piece.window] = piece.read(stored(piece.source))
        return whole

    def write(self, source: str, variable: Callable[[Piece], np.ndarray]) -> np.ndarray:
        """Returns the stored tensor, from what `variable` gives for its pieces.

        A piece with an `entry` is given that entry alone.
        """
        pieces = self.sources[source]
        blocks = [piece.take(variable(piece), whole=False) for piece in pieces]
        shared = pieces[0].layout.shared_axis
        block = blocks[0]
        if shared is not None:
            block = np.concatenate(blocks, axis=shared + 1)
        return block.reshape(self.shapes[source])


def plain_table(variables: Mapping[str, tuple[Path, tuple[int, ...]]]) -> Table:
    """Builds the table of a model whose variables lie as they are stored."""
    pieces = {
        name: Piece(source=name, target=path, layout=same_axes(len(shape)), sizes=sizes)
        for name, (path, shape) in variables.items()
        for sizes in [same_axes(len(shape)).sizes(shape, {})]
    }
    return Table(
        sources={name: (piece,) for name, piece in pieces.items()},
        targets={piece.target: (piece,) for piece in pieces.values()},
        shapes={name: shape for name, (_, shape) in variables.items()},
        variables={path: shape for path, shape in variables.values()},
    )


def joined(one: Table, other: Table) -> Table:
    """Puts together the tables of two sets of tensors and variables."""
    return Table(
        sources={**one.sources, **other.sources},
        targets={**one.targets, **other.targets},
        shapes={**one.shapes, **other.shapes},
        variables={**one.variables, **other.variables},
        copies=one.copies | other.copies,
        ignored=one.ignored + other.ignored,
    )


def same_axes(rank: int) -> Layout:
    """The layout of a tensor that lies in the variable as it is stored."""
    axes = " ".join(f"a{i}" for i in range(rank))
    return Layout(f"{axes} -> {axes}")


def shown(path: Path) -> str:
    """Writes a variable's path as rules do: without `params/`."""
    return "/".join(path[1:] if path[:1] == ("params",) else path)


def name_faults(
    table: Table, found: Mapping[str, tuple[int, ...]], alternatives: str
) -> list[str]:
    """Lists missing, unexpected and mis-shaped stored tensors, with nearest names."""
    missing = [name for name in table.sources if name not in found]
    missing = [name for name in missing if name not in table.copies]
    extra = [
        name for name in found if name not in table.sources and not table.ignores(name)
    ]
    faults = [f"missing: {line}" for line in brief(missing)]
    faults += [
        f"unexpected: {line}" for line in brief(extra, near=missing or [*table.sources])
    ]
    faults += [
        f"mis-shaped: {name} is {list(found[name])} in the file, and the model wants "
        f"{list(shape)}"
        for name, shape in table.shapes.items()
        if name in found and found[name] != shape
    ]
    if missing and extra and alternatives:
        faults.append(alternatives)
    return faults
