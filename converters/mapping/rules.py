"""Which stored tensor is which variable: one record a pair, read in both directions.

    Rule("model.layers.{n}.self_attn.q_proj.weight", "layers/{n}/attn/q/weight",
         "(heads dim) embed -> heads dim embed")

A name in braces that stands on both sides is the same there, a layer's number or a
`weight` beside its `bias`. One that stands in the stored name alone is an axis of the
variable: `experts.{e}.up.weight` with `mlp embed -> e mlp embed` stacks the experts.
Rules that name the same tensor share it along the axis their layouts mark with a bar,
in the order of the table.
"""

import re
from dataclasses import dataclass
from functools import cached_property

HEADS = "(heads dim) embed -> heads dim embed"
"""Weights of a linear map to the heads."""

HEADS_BIAS = "(heads dim) -> heads dim"
"""Biases of a linear map to the heads."""

FROM_HEADS = "embed (heads dim) -> embed heads dim"
"""Weights of a linear map from the heads."""

HOLE = re.compile(r"\{(\w+)\}")
"""A name in braces."""


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


def template_pattern(template: str) -> re.Pattern[str]:
    """Compiles a name with open places, as in `layers/{n}/attn`."""
    parts = HOLE.split(template)
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
