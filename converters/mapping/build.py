"""Builds the table of a model: one rule for each variable, or an error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dew.converters.mapping.layout import Layout
from dew.converters.mapping.rules import HOLE, Rule
from dew.converters.mapping.table import Piece, Table, rule_path, same_axes
from dew.typing import Path


def build_table(
    rules: Sequence[Rule],
    variables: Mapping[Path, tuple[int, ...]],
    *,
    copies: Sequence[Rule] = (),
    ignored: tuple[str, ...] = (),
) -> Table:
    """Matches rules with the variables of a model, given by path and shape.

    Rules and copies whose variable the model lacks (for example a bias) are skipped.
    `copies` are stored tensors that repeat a variable, `ignored` names of stored
    tensors without effect.

    Raises:
        ValueError: a variable has no rule or more than one, or rules that name the
            same tensor do not share it; all of them are named.
    """
    draft = _Draft(variables)
    matched = [match for path in variables for match in draft.matches(path, rules)]
    # Variables that share a tensor are cut from it in the order of the rules, which may
    # differ from the order in which the model lists its variables.
    for i, path, binding in sorted(matched, key=lambda match: match[0]):
        draft.add(rules[i], path, binding)
    # Copies come after the rules: they add stored tensors, never a variable's owner.
    for copy in copies:
        path = ("params", *copy.target.split("/"))
        if path in variables:
            draft.add(copy, path, {}, is_copy=True)
    draft.check_shared()
    if draft.faults:
        raise ValueError("the rules do not fit the model: " + "; ".join(draft.faults))
    sources, shapes = draft.sized_pieces()
    targets: dict[Path, tuple[Piece, ...]] = {}
    # A variable is read from its owners alone: a copy may be absent from the file.
    for name, pieces in sources.items():
        if name not in draft.copies:
            for piece in pieces:
                targets[piece.target] = (*targets.get(piece.target, ()), piece)
    return Table(
        sources=sources,
        targets=targets,
        shapes=shapes,
        variables=dict(variables),
        copies=frozenset(draft.copies),
        ignored=ignored,
    )


@dataclass
class _Draft:
    """Pieces and faults of a table while it is built."""

    variables: Mapping[Path, tuple[int, ...]]
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def matches(
        self, path: Path, rules: Sequence[Rule]
    ) -> list[tuple[int, Path, dict[str, str]]]:
        """Finds the rule of one variable: its index, and the value of each brace."""
        name = rule_path(path)
        bound = [
            (i, path, binding)
            for i, rule in enumerate(rules)
            if (binding := rule.binds(name)) is not None
        ]
        if not bound:
            self.faults.append(f"{name} has no rule")
        elif len(bound) > 1:
            sources = ", ".join(rules[i].source for i, _, _ in bound)
            self.faults.append(f"{name} has {len(bound)} rules: {sources}")
        return bound[:1]

    def add(
        self, rule: Rule, path: Path, binding: Mapping[str, str], is_copy: bool = False
    ) -> None:
        """Adds the pieces of one rule for one variable."""
        shape = self.variables[path]
        layout = Layout(rule.layout) if rule.layout else same_axes(len(shape))
        source = rule.source
        for name, number in binding.items():
            source = source.replace("{" + name + "}", number)
        # Braces that the variable's path does not fill number the entries of one of its
        # axes: one stored tensor for each expert.
        free = HOLE.findall(source)
        if not free:
            self._place(source, path, layout)
        elif len(free) == 1 and (free[0],) in layout.variable_axes:
            axis = layout.variable_axes.index((free[0],))
            inner = layout.drop_axis(free[0])
            for entry in range(shape[axis]):
                one = source.replace("{" + free[0] + "}", str(entry))
                self._place(one, path, inner, entry, axis)
        else:
            self.faults.append(
                f"{rule.source} leaves {', '.join(free)} open: a name in braces must "
                f"be in {rule.target!r} too, or be one axis of its layout"
            )
        if is_copy:
            self.copies.add(source)

    def _place(
        self,
        source: str,
        path: Path,
        layout: Layout,
        entry: int | None = None,
        axis: int = 0,
    ) -> None:
        piece = Piece(
            source=source, target=path, layout=layout, sizes={}, entry=entry, axis=axis
        )
        self.pieces.setdefault(source, []).append(piece)

    def check_shared(self) -> None:
        """Finds tensors that several rules read without sharing an axis."""
        for source, pieces in self.pieces.items():
            kinds = {(p.layout.shared_axis, p.layout.outer) for p in pieces}
            if len(pieces) > 1 and (
                len(kinds) > 1 or pieces[0].layout.shared_axis is None
            ):
                targets = ", ".join(rule_path(p.target) for p in pieces)
                self.faults.append(
                    f"{source} is read for {targets}, whose layouts do not mark one "
                    "shared axis with the same bar"
                )

    def sized_pieces(
        self,
    ) -> tuple[dict[str, tuple[Piece, ...]], dict[str, tuple[int, ...]]]:
        """Returns the pieces with sizes and runs, and the shapes of stored tensors."""
        sources, shapes = {}, {}
        for source, pieces in self.pieces.items():
            sources[source], shapes[source] = self._sized_runs(pieces)
        return sources, shapes

    def _sized_runs(
        self, pieces: Sequence[Piece]
    ) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
        outer = self._outer_sizes(pieces)
        sized = [
            replace(p, sizes=p.layout.sizes(self._shape(p), outer)) for p in pieces
        ]
        blocks = [p.layout.block(p.sizes) for p in sized]
        shared = sized[0].layout.shared_axis
        if shared is None:
            return tuple(sized), blocks[0]
        # A block has two axes for the shared one: the names before the bar, equal in
        # all pieces, and this piece's run, whose lengths add up.
        lengths = [block[shared + 1] for block in blocks]
        total = sum(lengths)
        stops = np.cumsum(lengths).tolist()
        runs = tuple(
            replace(p, start=stop - length, stop=stop, total=total)
            for p, length, stop in zip(sized, lengths, stops, strict=True)
        )
        first = blocks[0]
        shape = (*first[:shared], first[shared] * total, *first[shared + 2 :])
        return runs, shape

    def _outer_sizes(self, pieces: Sequence[Piece]) -> dict[str, int]:
        """Sizes of the names before the bar, from whichever variable has them alone."""
        return {
            axis[0]: size
            for p in pieces
            for axis, size in zip(p.layout.variable_axes, self._shape(p), strict=True)
            if len(axis) == 1 and axis[0] in p.layout.outer
        }

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        shape = self.variables[piece.target]
        if piece.entry is None:
            return shape
        return shape[: piece.axis] + shape[piece.axis + 1 :]
