"""Tied heads: the config's flag against the tensors that the file really stores.

| config | stored head | outcome |
|---|---|---|
| tied | absent | loads tied |
| tied | an equal copy | loads tied, exported with its copy |
| tied | different | refused, unless `tied` says which counts |
| untied | absent | refused, likewise |
| untied | equal or different | loads untied |

`tied="stored"` follows the file: a different head is kept and the export's config is
untied; an absent one is tied, in the export's config too. `tied="config"` follows the
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
    """How tied weights were settled, for loading and for the export's config."""

    copies: tuple[Rule, ...] = ()
    """Stored tensors that repeat a variable."""
    edits: Mapping[str, bool] = field(default_factory=dict)
    """New values of config fields."""
    dropped: frozenset[str] = frozenset()
    """Stored tensors that are not read."""
    borrowed: Mapping[str, str] = field(default_factory=dict)
    """Tensors that the file lacks, with the stored tensor each starts from."""
    faults: tuple[str, ...] = ()
    """Disagreements that `tied` did not settle."""


def settle(
    family: Family,
    rules: Sequence[Rule],
    copies: Iterable[Copy],
    config: Mapping[str, Any],
    weights: Weights,
    tied: Tied | None,
) -> Ties:
    """Compares the config's tying flags with the stored tensors.

    Args:
        family: the model's family.
        rules: its rules, in the spelling of the file.
        copies: tensors that may repeat another one.
        config: the fields of config.json.
        weights: the stored tensors.
        tied: which side counts where they disagree; None makes that a fault.
    """
    repeated: list[Rule] = []
    edits: dict[str, bool] = {}
    dropped: set[str] = set()
    borrowed: dict[str, str] = {}
    faults: list[str] = []
    for copy in (c for c in copies if family.has(c, config)):
        origin = next(rule.source for rule in rules if rule.target == copy.target)
        is_tied = copy.flag is None or family.flag(config, copy.flag)
        is_stored = copy.source in weights.entries
        # A file is right if it stores the head exactly when the config unties it, or
        # stores a copy that is equal. Both other cases are disagreements, and a copy
        # without a flag in the config cannot be settled.
        if is_stored and is_tied and _equal(weights, copy.source, origin):
            repeated.append(copy.rule)
        elif is_stored == is_tied:
            if copy.flag is None or tied is None:
                faults.append(_disagreement(copy, origin, is_stored=is_stored))
            if copy.flag is not None and tied == "stored":
                edits[copy.flag] = not is_stored
            elif is_stored:
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


def _disagreement(copy: Copy, origin: str, *, is_stored: bool) -> str:
    if copy.flag is None:
        return f"{copy.source} must repeat {origin}, and its values differ"
    if is_stored:
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
    """Whether two tensors have equal values; True where they cannot be read at all.

    Unreadable tensors and other shapes are faults that the loader lists itself.
    """
    is_readable = not weights.faults and all(
        n in weights.entries and weights.entries[n].dtype in FLOATS
        for n in (name, origin)
    )
    if not is_readable or weights.entries[name].shape != weights.entries[origin].shape:
        return True
    a, b = weights.view(name), weights.view(origin)
    is_equal = all(
        np.array_equal(x.astype(np.float64), y.astype(np.float64), equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )
    weights.release(name)
    weights.release(origin)
    return is_equal
