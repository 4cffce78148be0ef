"""How one stored tensor lies in a variable: an einops pattern, read in both directions.

    "(heads dim) embed -> heads dim embed"

says that the file's first axis is heads by dim. One mark is added to einops' own: in
`(kv | dim)` the bar says that several variables share the axis, each taking, for every
`kv`, a run of its own size. So `(| heads dim) embed` is one of several blocks laid end
to end, and `(mlp |)` one of several that alternate.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from einops import rearrange

Axis = tuple[str, ...]
"""The names multiplied together in one axis."""

_ATOM = re.compile(r"\(([^()]*)\)|([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Layout:
    """A pattern `stored -> variable`."""

    pattern: str

    @cached_property
    def _sides(self) -> tuple[list[str], list[str]]:
        sides = self.pattern.split("->")
        if len(sides) != 2:
            raise ValueError(
                f"a layout reads 'stored -> variable', got {self.pattern!r}"
            )
        stored, variable = (
            [group if group is not None else name for group, name in found]
            for found in (
                [(m.group(1), m.group(2)) for m in _ATOM.finditer(side)]
                for side in sides
            )
        )
        return stored, variable

    @cached_property
    def shared_axis(self) -> int | None:
        """The stored axis that carries the bar."""
        marked = [i for i, axis in enumerate(self._sides[0]) if "|" in axis]
        if len(marked) > 1:
            raise ValueError(
                f"a layout shares at most one axis, got {len(marked)} in "
                f"{self.pattern!r}"
            )
        return marked[0] if marked else None

    @property
    def variable_axes(self) -> list[Axis]:
        """The variable's axes, each as the names it multiplies."""
        return [tuple(axis.split()) for axis in self._sides[1]]

    def without(self, name: str) -> "Layout":
        """The layout of one entry of the variable's axis `name`."""
        stored, variable = self.pattern.split("->")
        kept = [token for token in variable.split() if token != name]
        return Layout(f"{stored}-> {' '.join(kept)}")

    @property
    def outer(self) -> Axis:
        """The names before the bar, which all variables on the axis share."""
        if self.shared_axis is None:
            return ()
        return tuple(self._sides[0][self.shared_axis].split("|")[0].split())

    def sizes(self, shape: Sequence[int], known: Mapping[str, int]) -> dict[str, int]:
        """Returns the size of every name, from the variable's shape.

        `known` settles an axis that multiplies several names.
        """
        axes = self.variable_axes
        if len(axes) != len(shape):
            raise ValueError(
                f"layout {self.pattern!r} makes a variable of {len(axes)} axes, but it "
                f"has shape {tuple(shape)}"
            )
        found: dict[str, int] = {}
        for axis, size in zip(axes, shape, strict=True):
            if len(axis) == 1:
                found[axis[0]] = size
        for axis, size in zip(axes, shape, strict=True):
            unknown = [name for name in axis if name not in {**known, **found}]
            rest = math.prod({**known, **found}[n] for n in axis if n not in unknown)
            if len(unknown) == 1 and rest and size % rest == 0:
                found[unknown[0]] = size // rest
            elif unknown or rest != size:
                raise ValueError(
                    f"layout {self.pattern!r} does not fit a variable of shape "
                    f"{tuple(shape)}: {' · '.join(axis) or '1'} is not {size}"
                )
        return {**{name: known[name] for name in self.outer if name in known}, **found}

    def stored_outputs(self, outputs: int) -> list[bool]:
        """Says of each stored axis whether it is of the variable's first `outputs`."""
        outs = {name for axis in self.variable_axes[:outputs] for name in axis}
        return [set(axis.replace("|", " ").split()) <= outs for axis in self._sides[0]]

    def factors(self, outputs: int, inner: str) -> tuple["Layout", "Layout"]:
        """The layouts of a low-rank matrix of this form, of B A in place of W.

        A is stored [inner, inputs] and B [outputs, inner], whichever way W lies.

        Args:
            outputs: how many axes of the variable, from the first, are outputs.
            inner: a name for the new axis, which this layout lacks.
        """
        sides: dict[bool, list[str]] = {True: [], False: []}
        for axis, is_output in zip(
            self._sides[0], self.stored_outputs(outputs), strict=True
        ):
            sides[is_output].append(f"({axis})")
        if [len(side) for side in sides.values()] != [1, 1] or "|" in sides[False][0]:
            raise ValueError(
                f"layout {self.pattern!r} is no matrix of outputs and inputs apart"
            )
        out, into = (
            " ".join(f"({' '.join(axis)})" for axis in axes)
            for axes in (self.variable_axes[:outputs], self.variable_axes[outputs:])
        )
        return (
            Layout(f"{inner} {sides[False][0]} -> {inner} {into}"),
            Layout(f"{sides[True][0]} {inner} -> {out} {inner}"),
        )

    def block(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of this variable's share of the stored tensor.

        A shared axis counts as two: the names before the bar, and the rest.
        """
        shape: list[int] = []
        for axis in self._split_axes():
            shape.append(math.prod(sizes[name] for name in axis.split()))
        return tuple(shape)

    def to_variable(self, block: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Reads the block as the variable; a view wherever strides allow it."""
        left, right = self._einops()
        return rearrange(block, f"{left} -> {right}", **self._needed(sizes))

    def to_block(self, variable: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Reads the variable as the block: the pattern backwards."""
        left, right = self._einops()
        return rearrange(variable, f"{right} -> {left}", **self._needed(sizes))

    def _split_axes(self) -> list[str]:
        axes: list[str] = []
        for axis in self._sides[0]:
            axes.extend(axis.split("|"))
        return axes

    def _einops(self) -> tuple[str, str]:
        left = " ".join(f"({axis.strip()})" for axis in self._split_axes())
        right = " ".join(f"({' '.join(axis)})" for axis in self.variable_axes)
        return left, right

    def _needed(self, sizes: Mapping[str, int]) -> dict[str, int]:
        names = {name for axis in self.variable_axes for name in axis}
        return {name: size for name, size in sizes.items() if name in names}
