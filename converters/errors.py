"""Errors of the native road, and names in messages: ranges and nearest names."""

import difflib
import re
from collections.abc import Iterable, Sequence


class UnsupportedError(ValueError):
    """A model that the native road leaves to the lowered one.

    `fault` states why in one sentence; the whole message adds what to do.
    """

    def __init__(self, fault: str, advice: str) -> None:
        super().__init__(f"{fault}{advice}")
        self.fault = fault


_NUMBER = re.compile(r"(?<![^./_-])\d+(?![^./_-])")


def brief(names: Iterable[str], *, near: Sequence[str] = ()) -> list[str]:
    """Returns names as few lines, numbers as ranges: `layers.{0-31}.mlp.up.weight`.

    Args:
        names: the names to list.
        near: correct names; each line ends with the most similar of them.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("{}", name), []).append(name)
    return [_line(group) + nearest(group[0], near) for group in groups.values()]


def nearest(name: str, names: Sequence[str], *, likeness: float = 0.6) -> str:
    """Returns ` (nearest: …)`, or an empty text where none of `names` is similar."""
    matches = difflib.get_close_matches(name, names, n=1, cutoff=likeness)
    return f" (nearest: {matches[0]})" if matches else ""


def _line(group: Sequence[str]) -> str:
    if len(group) == 1:
        return group[0]
    numbers = [tuple(int(n) for n in _NUMBER.findall(name)) for name in group]
    columns = list(zip(*numbers, strict=True))
    ranges = iter([_range(sorted(set(column))) for column in columns])
    line = _NUMBER.sub(lambda _: next(ranges), group[0])
    full = 1
    for column in columns:
        full *= len(set(column))
    return line if full == len(group) else ", ".join(group)


def _range(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"{{{numbers[0]}-{numbers[-1]}}}"
    return "{" + ",".join(str(n) for n in numbers) + "}"
