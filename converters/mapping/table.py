"""Table of the stored tensors and variables of one model, to read and to write.

`dew.converters.mapping.build` makes one from rules and a model. `plain_table` makes
that of a lowered model, whose variables have the axes of the stored tensors.
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
"""Part of a variable, one slice for each axis, as one device holds it."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One stored tensor's part in one variable.

    Attributes:
        source: name of the stored tensor.
        target: path of the variable.
        layout: layout of the tensor in the variable, or in its entry.
        sizes: size of every name of the layout.
        entry: index on the variable's `axis` that the tensor fills; None if it fills
            the variable.
        axis: axis that `entry` is an index of.
        start: start of this variable's run on the shared axis.
        stop: end of that run.
        total: length of all runs together.
        window: part of the variable, or of its entry, that the tensor fills; None is
            all of it.
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
        """Returns this variable's part of the stored tensor; a view where possible."""
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

    def take(self, variable: np.ndarray) -> np.ndarray:
        """Returns the block of the stored tensor that the variable fills.

        `variable` is this piece's entry alone if it has one.
        """
        if self.window is not None:
            variable = variable[self.window]
        return self.layout.to_block(variable, self.sizes)


LEFTOVER = re.compile(
    r"(.*\.)?(rotary_emb\w*\.(\w*inv_freq|(sin|cos)_cached)|masked_bias"
    r"|attn\.embed_positions|position_ids|decoder\.version)"
)
"""Buffers that versions of transformers stored and compute now, at any level."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """All stored tensors and all variables of one model, joined by pieces.

    Attributes:
        sources: pieces by stored tensor, in the order of their runs.
        targets: pieces by variable, in the order of their entries.
        shapes: shapes of the stored tensors.
        variables: shapes of the variables.
        copies: names of stored tensors that repeat another one's variable.
        ignored: names of other stored tensors without effect, with braces.
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
        """Whether a stored tensor is one of those without effect.

        Those that `ignored` names, and buffers that are computed now.
        """
        is_named = any(p.fullmatch(name) for p in self._ignored_patterns)
        return is_named or LEFTOVER.fullmatch(name) is not None

    def read(
        self, target: Path, stored: Callable[[str], np.ndarray], index: Index
    ) -> np.ndarray:
        """Returns the part `index` of a variable, reading only the tensors it needs.

        `stored` returns a tensor by name; it may be a memory map.
        """
        pieces = self.targets[target]
        # With the dots a variable without axes stays an array.
        if pieces[0].window is not None:
            return self._from_windows(target, stored)[*index, ...]
        if pieces[0].entry is None:
            return pieces[0].read(stored(pieces[0].source))[*index, ...]
        # Stacked entries: only those in the device's slice of the axis are read, so a
        # shard of the experts costs that many experts' bytes.
        axis = pieces[0].axis
        rest = index[:axis] + index[axis + 1 :]
        in_slice = pieces[index[axis]] if index else pieces
        parts = [piece.read(stored(piece.source))[rest] for piece in in_slice]
        return np.stack(parts, axis=axis)

    def _from_windows(
        self, target: Path, stored: Callable[[str], np.ndarray]
    ) -> np.ndarray:
        """Returns a variable of which each stored tensor fills one window."""
        pieces = self.targets[target]
        first = stored(pieces[0].source)
        variable = np.empty(self.variables[target], first.dtype)
        for piece in pieces:
            at = (slice(None),) * piece.axis + (piece.entry,)
            part = variable if piece.entry is None else variable[at]
            part[piece.window] = piece.read(stored(piece.source))
        return variable

    def write(self, source: str, variable: Callable[[Piece], np.ndarray]) -> np.ndarray:
        """Returns a stored tensor, from the values of its pieces.

        `variable` returns the variable of a piece, or its entry alone if it has one.
        """
        pieces = self.sources[source]
        blocks = [piece.take(variable(piece)) for piece in pieces]
        shared = pieces[0].layout.shared_axis
        block = blocks[0]
        if shared is not None:
            block = np.concatenate(blocks, axis=shared + 1)
        return block.reshape(self.shapes[source])


def plain_table(variables: Mapping[str, tuple[Path, tuple[int, ...]]]) -> Table:
    """Builds the table of a model whose variables have the stored axes.

    `variables` has the path and shape of each variable by its stored name.
    """
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


def join_tables(one: Table, other: Table) -> Table:
    """Joins the tables of two disjoint sets of tensors and variables."""
    return Table(
        sources={**one.sources, **other.sources},
        targets={**one.targets, **other.targets},
        shapes={**one.shapes, **other.shapes},
        variables={**one.variables, **other.variables},
        copies=one.copies | other.copies,
        ignored=one.ignored + other.ignored,
    )


def same_axes(rank: int) -> Layout:
    """Returns the layout of a tensor whose axes are those of the variable."""
    axes = " ".join(f"a{i}" for i in range(rank))
    return Layout(f"{axes} -> {axes}")


def rule_path(path: Path) -> str:
    """Returns a variable's path as rules write it: without `params/`."""
    return "/".join(path[1:] if path[:1] == ("params",) else path)


def name_faults(
    table: Table, shapes: Mapping[str, tuple[int, ...]], alternatives: str
) -> list[str]:
    """Lists missing, unexpected and mis-shaped stored tensors, with nearest names.

    `shapes` are those in the file; `alternatives` is a line for the case that names
    are both missing and unexpected.
    """
    missing = [name for name in table.sources if name not in shapes]
    missing = [name for name in missing if name not in table.copies]
    extra = [
        name for name in shapes if name not in table.sources and not table.ignores(name)
    ]
    faults = [f"missing: {line}" for line in brief(missing)]
    faults += [
        f"unexpected: {line}" for line in brief(extra, near=missing or [*table.sources])
    ]
    faults += [
        f"mis-shaped: {name} is {list(shapes[name])} in the file, and the model wants "
        f"{list(shape)}"
        for name, shape in table.shapes.items()
        if name in shapes and shapes[name] != shape
    ]
    if missing and extra and alternatives:
        faults.append(alternatives)
    return faults
