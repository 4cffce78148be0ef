"""Which stored tensor is which variable: one record a pair, read in both directions.

    Rule("model.layers.{n}.self_attn.q_proj.weight", "layers/{n}/attn/q/weight",
         "(heads dim) embed -> heads dim embed")

A name in braces that stands on both sides is the same there, a layer's number or a
`weight` beside its `bias`. One that stands in the stored name alone is an axis of the
variable: `experts.{e}.up.weight` with `mlp embed -> e mlp embed` stacks the experts.
Rules that name the same tensor share it along the axis their layouts mark with a bar,
in the order of the table.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dew.converters.layouts import Layout
from dew.converters.naming import brief
from dew.typing import Path

Index = tuple[slice, ...]
"""The part of a variable that one device holds."""

HEADS = "(heads dim) embed -> heads dim embed"
"""Weights of a linear map to the heads."""

HEADS_BIAS = "(heads dim) -> heads dim"
"""Biases of a linear map to the heads."""

FROM_HEADS = "embed (heads dim) -> embed heads dim"
"""Weights of a linear map from the heads."""

_HOLE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Rule:
    """A stored tensor, the variable (below `params`) it is, and how it lies in it.

    Without a layout the two have the same axes.
    """

    source: str
    target: str
    layout: str = ""

    @cached_property
    def _target_pattern(self) -> re.Pattern[str]:
        return template_pattern(self.target)

    def binds(self, target: str) -> dict[str, str] | None:
        """Returns what the braces stand for; None where `target` is not this rule's."""
        match = self._target_pattern.fullmatch(target)
        return match.groupdict() if match else None


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A spelling of the stored names: what `model.` became, and what all others got.

    `Prefix(body="language_model.model.", rest="language_model.")` is a checkpoint of a
    model that wraps ours. `names` are parts of names that it writes in another way.
    """

    body: str
    rest: str = ""
    names: tuple[tuple[str, str], ...] = ()

    def spell(self, name: str, written: str) -> str:
        """Spells `name`, which a family writes with the prefix `written`."""
        for ours, theirs in self.names:
            name = name.replace(ours, theirs)
        if written and name.startswith(written):
            return self.body + name.removeprefix(written)
        return self.rest + name if written else self.body + name


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One stored tensor's part in one variable.

    `entry` is the place on the variable's `axis` that the tensor fills, None where it
    fills all. `start` and `stop` bound its run on a shared axis of `total`.
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
        return self.layout.to_block(variable, self.sizes)


def template_pattern(template: str) -> re.Pattern[str]:
    """Compiles a name with open places, as in `layers/{n}/attn`."""
    parts = _HOLE.split(template)
    seen: set[str] = set()
    pattern = ""
    for i, part in enumerate(parts):
        if i % 2 == 0:
            pattern += re.escape(part)
        elif part in seen:
            pattern += f"(?P={part})"
        else:
            seen.add(part)
            pattern += rf"(?P<{part}>[^/.]+)"
    return re.compile(pattern)


def shown(path: Path) -> str:
    """Writes a variable's path as rules do: without `params/`."""
    return "/".join(path[1:] if path[:1] == ("params",) else path)


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
        if pieces[0].entry is None:
            return pieces[0].read(stored(pieces[0].source))[index]
        axis = pieces[0].axis
        rest = index[:axis] + index[axis + 1 :]
        chosen = pieces[index[axis]] if index else pieces
        parts = [piece.read(stored(piece.source))[rest] for piece in chosen]
        return np.stack(parts, axis=axis)

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
        name: Piece(source=name, target=path, layout=_same(len(shape)), sizes=sizes)
        for name, (path, shape) in variables.items()
        for sizes in [_same(len(shape)).sizes(shape, {})]
    }
    return Table(
        sources={name: (piece,) for name, piece in pieces.items()},
        targets={piece.target: (piece,) for piece in pieces.values()},
        shapes={name: shape for name, (_, shape) in variables.items()},
        variables={path: shape for path, shape in variables.values()},
    )


def build_table(
    rules: Sequence[Rule],
    variables: Mapping[Path, tuple[int, ...]],
    *,
    copies: Sequence[Rule] = (),
    ignored: tuple[str, ...] = (),
) -> Table:
    """Matches rules with the variables of a model.

    Rules whose variable this model lacks (a bias, say) say nothing about it. `copies`
    are stored tensors that repeat a variable.

    Raises:
        ValueError: a variable has no rule or more than one, or rules that name the
            same tensor do not share it; all of them are named.
    """
    draft = _Draft(variables)
    matched = [match for path in variables for match in draft.matches(path, rules)]
    # Tensors that variables share are cut in the order of the rules.
    for i, path, binding in sorted(matched, key=lambda match: match[0]):
        draft.add(rules[i], path, binding)
    for copy in copies:
        path = ("params", *copy.target.split("/"))
        draft.add(copy, path, {}, is_copy=True)
    draft.check_shared()
    if draft.faults:
        raise ValueError("the rules do not fit the model: " + "; ".join(draft.faults))
    sources, shapes = draft.placed()
    targets: dict[Path, tuple[Piece, ...]] = {}
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


def _same(rank: int) -> Layout:
    axes = " ".join(f"a{i}" for i in range(rank))
    return Layout(f"{axes} -> {axes}")


@dataclass
class _Draft:
    """A table while it is being built."""

    variables: Mapping[Path, tuple[int, ...]]
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def matches(
        self, path: Path, rules: Sequence[Rule]
    ) -> list[tuple[int, Path, dict[str, str]]]:
        """Finds the rule of one variable: its place, and what its braces stand for."""
        name = shown(path)
        bound = [
            (i, path, binding)
            for i, rule in enumerate(rules)
            if (binding := rule.binds(name)) is not None
        ]
        if not bound:
            self.faults.append(f"{name} has no rule")
        elif len(bound) > 1:
            named = ", ".join(rules[i].source for i, _, _ in bound)
            self.faults.append(f"{name} has {len(bound)} rules: {named}")
        return bound[:1]

    def add(
        self, rule: Rule, path: Path, binding: Mapping[str, str], is_copy: bool = False
    ) -> None:
        """Adds the pieces of one rule for one variable."""
        shape = self.variables[path]
        layout = Layout(rule.layout) if rule.layout else _same(len(shape))
        source = rule.source
        for name, number in binding.items():
            source = source.replace("{" + name + "}", number)
        free = _HOLE.findall(source)
        if not free:
            self._place(source, path, layout)
        elif len(free) == 1 and (free[0],) in layout.variable_axes:
            axis = layout.variable_axes.index((free[0],))
            inner = layout.without(free[0])
            for entry in range(shape[axis]):
                named = source.replace("{" + free[0] + "}", str(entry))
                self._place(named, path, inner, entry, axis)
        else:
            self.faults.append(
                f"{rule.source} leaves {', '.join(free)} open: a name in braces stands "
                f"in {rule.target!r} too, or is one axis of its layout"
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
                named = ", ".join(shown(p.target) for p in pieces)
                self.faults.append(
                    f"{source} is read for {named}, whose layouts do not mark one "
                    "shared axis with the same bar"
                )

    def placed(
        self,
    ) -> tuple[dict[str, tuple[Piece, ...]], dict[str, tuple[int, ...]]]:
        """Works out sizes, runs and stored shapes."""
        sources, shapes = {}, {}
        for source, pieces in self.pieces.items():
            sources[source], shapes[source] = self._runs(pieces)
        return sources, shapes

    def _runs(
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
        """The names before the bar, as any of the variables settles them."""
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
