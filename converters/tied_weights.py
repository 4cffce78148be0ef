"""Tied heads: what the config says against what the file really stores.

| config | stored head | outcome |
|---|---|---|
| tied | absent | loads tied |
| tied | an equal copy | loads tied, exported with its copy |
| tied | different | refused, unless `tied` says which counts |
| untied | absent | refused, likewise |
| untied | equal or different | loads untied |

`tied="stored"` believes the file: a different head stays and the export's config says
untied; an absent one is tied and the config says so. `tied="config"` believes the
config: a different head is dropped, an absent one starts as a copy of the embedding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dew.converters.families.base import Copy, Family
from dew.converters.folder.weights import FLOATS, Weights
from dew.converters.mapping.rules import Rule

Tied = Literal["stored", "config"]


@dataclass(frozen=True, kw_only=True)
class Ties:
    """The outcome: which stored tensors repeat a variable, and what an export changes.

    `edits` are new values of config fields, `dropped` stored tensors that do not count,
    and `borrowed` tensors that the file lacks, with the one each starts from. `faults`
    are disagreements that nobody settled.
    """

    copies: tuple[Rule, ...] = ()
    edits: Mapping[str, Any] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    borrowed: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


def settle(
    family: Family,
    rules: Sequence[Rule],
    copies: Iterable[Copy],
    config: Mapping[str, Any],
    weights: Weights,
    tied: Tied | None,
) -> Ties:
    """Holds what the config says against the file; `tied` settles disagreements."""
    repeated: list[Rule] = []
    edits: dict[str, Any] = {}
    dropped: set[str] = set()
    borrowed: dict[str, str] = {}
    faults: list[str] = []
    for copy in (c for c in copies if family.has(c, config)):
        origin = next(rule.source for rule in rules if rule.target == copy.target)
        says = copy.flag is None or family.flag(config, copy.flag)
        held = copy.source in weights.entries
        if held and says and _equal(weights, copy.source, origin):
            repeated.append(copy.rule)
        elif held == says:
            if copy.flag is None or tied is None:
                faults.append(_disagreement(copy, origin, held=held))
            if copy.flag is not None and tied == "stored":
                edits[copy.flag] = not held
            elif held:
                dropped.add(copy.source)
            else:
                borrowed[copy.source] = origin
    return Ties(
        copies=tuple(repeated),
        edits=edits,
        dropped=frozenset(dropped),
        borrowed=borrowed,
        faults=tuple(faults),
    )


def _disagreement(copy: Copy, origin: str, *, held: bool) -> str:
    if copy.flag is None:
        return f"{copy.source} must repeat {origin}, and its values differ"
    if held:
        return (
            f"{copy.flag} says that {copy.source} repeats {origin}, but the file "
            'stores different values; tied="stored" keeps them apart, tied="config" '
            f"drops {copy.source}"
        )
    return (
        f"missing: {copy.source}, and {copy.flag} says that it does not repeat "
        f'{origin}; tied="stored" ties the two, tied="config" starts it as a copy'
    )


def _equal(weights: Weights, name: str, origin: str) -> bool:
    """Whether two tensors hold the same numbers; True where that cannot be told yet."""
    known = not weights.faults and all(
        n in weights.entries and weights.entries[n].dtype in FLOATS
        for n in (name, origin)
    )
    if not known or weights.entries[name].shape != weights.entries[origin].shape:
        return True
    a, b = weights.view(name), weights.view(origin)
    same = all(
        np.array_equal(x.astype(np.float64), y.astype(np.float64), equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )
    weights.release(name)
    weights.release(origin)
    return same
