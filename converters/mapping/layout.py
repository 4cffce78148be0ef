"""Layout of a stored tensor in a variable: an einops pattern, read both ways.

    "(heads dim) embed -> heads dim embed"

reads a matrix whose rows are heads by dim. One mark is added to einops' own: a bar, as
in `(kv | dim)`, marks an axis that several variables share, each with a run of its own
size for every `kv`. So `(| heads dim) embed` is one of several blocks laid end to end,
and `(mlp |)` one of several that alternate.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from einops import rearrange

Axis = tuple[str, ...]
"""Names that are multiplied together in one axis."""

_ATOM = re.compile(r"\(([^()]*)\)|([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Layout:
    """Layout of one stored tensor in one variable, as `stored -> variable`."""

    pattern: str

    @cached_property
    def _sides(self) -> tuple[list[str], list[str]]:
        sides = self.pattern.split("->")
        if len(sides) != 2:
            raise ValueError(
                f"a layout reads 'stored -> variable', got {self.pattern!r}"
            )
        stored, variable = (
            [group if group is not None else name for group, name in atoms]
            for atoms in (
                [(m.group(1), m.group(2)) for m in _ATOM.finditer(side)]
                for side in sides
            )
        )
        return stored, variable

    @cached_property
    def shared_axis(self) -> int | None:
        """Index of the stored axis with the bar, or None."""
        marked = [i for i, axis in enumerate(self._sides[0]) if "|" in axis]
        if len(marked) > 1:
            raise ValueError(
                f"a layout shares at most one axis, got {len(marked)} in "
                f"{self.pattern!r}"
            )
        return marked[0] if marked else None

    @property
    def variable_axes(self) -> list[Axis]:
        """Axes of the variable, each as the names that it multiplies."""
        return [tuple(axis.split()) for axis in self._sides[1]]

    def drop_axis(self, name: str) -> "Layout":
        """Returns the layout of one entry of the variable's axis `name`."""
        stored, variable = self.pattern.split("->")
        tokens = [token for token in variable.split() if token != name]
        return Layout(f"{stored}-> {' '.join(tokens)}")

    @property
    def outer(self) -> Axis:
        """Names before the bar, whose sizes all variables on the axis share."""
        if self.shared_axis is None:
            return ()
        return tuple(self._sides[0][self.shared_axis].split("|")[0].split())

    def sizes(self, shape: Sequence[int], outer: Mapping[str, int]) -> dict[str, int]:
        """Returns the size of every name, from the variable's shape.

        `outer` has the sizes of names before the bar, which settle an axis that
        multiplies several names.

        Raises:
            ValueError: the shape does not fit, or leaves a size open.
        """
        axes = self.variable_axes
        if len(axes) != len(shape):
            raise ValueError(
                f"layout {self.pattern!r} makes a variable of {len(axes)} axes, but it "
                f"has shape {tuple(shape)}"
            )
        sizes: dict[str, int] = {}
        # Axes of one name first: they settle names that a product shares with them.
        for axis, size in zip(axes, shape, strict=True):
            if len(axis) == 1:
                sizes[axis[0]] = size
        for axis, size in zip(axes, shape, strict=True):
            unknown = [name for name in axis if name not in {**outer, **sizes}]
            rest = math.prod({**outer, **sizes}[n] for n in axis if n not in unknown)
            if len(unknown) == 1 and rest and size % rest == 0:
                sizes[unknown[0]] = size // rest
            elif unknown or rest != size:
                raise ValueError(
                    f"layout {self.pattern!r} does not fit a variable of shape "
                    f"{tuple(shape)}: {' · '.join(axis) or '1'} is not {size}"
                )
        return {**{name: outer[name] for name in self.outer if name in outer}, **sizes}

    def stored_outputs(self, outputs: int) -> list[bool]:
        """Whether each stored axis belongs to the variable's first `outputs` axes."""
        outs = {name for axis in self.variable_axes[:outputs] for name in axis}
        return [set(axis.replace("|", " ").split()) <= outs for axis in self._sides[0]]

    def factors(self, outputs: int, inner: str) -> tuple["Layout", "Layout"]:
        """Layouts of the low-rank factors A and B, where B A has this matrix's form.

        A is stored [inner, inputs] and B [outputs, inner], whether or not this matrix
        is stored input-first.

        Args:
            outputs: number of the variable's leading axes that are outputs.
            inner: name of the new axis, which this layout must not have.
        """
        sides: dict[bool, list[str]] = {True: [], False: []}
        for axis, is_output in zip(
            self._sides[0], self.stored_outputs(outputs), strict=True
        ):
            sides[is_output].append(f"({axis})")
        if [len(side) for side in sides.values()] != [1, 1] or "|" in sides[False][0]:
            raise ValueError(
                f"layout {self.pattern!r} is not a matrix with outputs and inputs apart"
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
        """Shape of this variable's share of the stored tensor.

        A shared axis counts as two: the names before the bar, and those after it.
        """
        shape: list[int] = []
        for axis in self._split_axes():
            shape.append(math.prod(sizes[name] for name in axis.split()))
        return tuple(shape)

    def to_variable(self, block: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Rearranges the block to the variable; a view wherever strides allow it."""
        left, right = self._einops()
        return rearrange(block, f"{left} -> {right}", **self._pattern_sizes(sizes))

    def to_block(self, variable: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Rearranges the variable to the block: the pattern read backwards."""
        left, right = self._einops()
        return rearrange(variable, f"{right} -> {left}", **self._pattern_sizes(sizes))

    def _split_axes(self) -> list[str]:
        axes: list[str] = []
        for axis in self._sides[0]:
            axes.extend(axis.split("|"))
        return axes

    def _einops(self) -> tuple[str, str]:
        left = " ".join(f"({axis.strip()})" for axis in self._split_axes())
        right = " ".join(f"({' '.join(axis)})" for axis in self.variable_axes)
        return left, right

    def _pattern_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        names = {name for axis in self.variable_axes for name in axis}
        return {name: size for name, size in sizes.items() if name in names}
