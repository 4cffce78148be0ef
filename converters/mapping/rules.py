"""Rules from stored tensors to variables: one record a pair, read both ways.

    Rule("model.layers.{n}.self_attn.q_proj.weight", "layers/{n}/attn/q/weight",
         "(heads dim) embed -> heads dim embed")

A name in braces on both sides has one value there: a layer's number, or `weight` beside
`bias`. A name in braces on the stored side alone is an axis of the variable:
`experts.{e}.up.weight` with `mlp embed -> e mlp embed` stacks the experts. Rules with
the same stored tensor share it along the axis that their layouts mark with a bar, in
the order of the table.
"""

import re
from dataclasses import dataclass
from functools import cached_property

HEADS = "(heads dim) embed -> heads dim embed"
"""Layout of the weight of a linear map from hidden states to heads."""

HEADS_BIAS = "(heads dim) -> heads dim"
"""Layout of the bias of a linear map from hidden states to heads."""

FROM_HEADS = "embed (heads dim) -> embed heads dim"
"""Layout of the weight of a linear map from heads to hidden states."""

HOLE = re.compile(r"\{(\w+)\}")
"""Regular expression of a name in braces."""


@dataclass(frozen=True)
class Rule:
    """A stored tensor, the variable below `params` that it is, and its layout there.

    Without a layout the two have the same axes. One rule reads and writes:

    >>> import numpy as np
    >>> from dew.converters.mapping import Rule, build_table
    >>> from dew.converters.mapping.rules import HEADS
    >>> rule = Rule("h.{n}.q.weight", "layers/{n}/q", HEADS)
    >>> path = ("params", "layers", "0", "q")
    >>> table = build_table([rule], {path: (2, 4, 3)})
    >>> stored = {"h.0.q.weight": np.arange(24.0).reshape(8, 3)}
    >>> variable = table.read(path, stored.get, (slice(None),) * 3)
    >>> variable.shape
    (2, 4, 3)
    >>> written = table.write("h.0.q.weight", lambda piece: variable)
    >>> bool((written == stored["h.0.q.weight"]).all())
    True
    """

    source: str
    target: str
    layout: str = ""

    @cached_property
    def _target_pattern(self) -> re.Pattern[str]:
        return template_pattern(self.target)

    def binds(self, target: str) -> dict[str, str] | None:
        """Returns the value of each brace; None if `target` is another variable."""
        match = self._target_pattern.fullmatch(target)
        return match.groupdict() if match else None


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A spelling of stored names: a prefix for the trunk and one for the rest.

    `body` replaces the prefix that a family's rules have, and `rest` is added to names
    without it: `Prefix(body="language_model.model.", rest="language_model.")` is a
    checkpoint of a model that wraps this one. `names` are parts of names with their
    replacements.
    """

    body: str
    rest: str = ""
    names: tuple[tuple[str, str], ...] = ()

    def spell(self, name: str, written: str) -> str:
        """Spells `name`, which the family's rules have with the prefix `written`."""
        for part, replacement in self.names:
            name = name.replace(part, replacement)
        if written and name.startswith(written):
            return self.body + name.removeprefix(written)
        return self.rest + name if written else self.body + name


def template_pattern(template: str) -> re.Pattern[str]:
    """Compiles a name with braces, such as `layers/{n}/attn`, to match whole names."""
    parts = HOLE.split(template)
    bound: set[str] = set()
    pattern = ""
    # split() with one group alternates: text at even places, names at odd ones.
    for i, part in enumerate(parts):
        if i % 2 == 0:
            pattern += re.escape(part)
        elif part in bound:
            pattern += f"(?P={part})"
        else:
            bound.add(part)
            pattern += rf"(?P<{part}>[^/.]+)"
    return re.compile(pattern)
