"""Loss terms by their names on the command line."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

import optax

from dew.losses.divergences import (
    TVD,
    CrossEntropy,
    ForwardKL,
    ReverseKL,
    Sampled,
    ScaledJSD,
    SkewKL,
    SoftCrossEntropy,
)
from dew.losses.hidden_states import (
    AttentionMap,
    HiddenCosine,
    HiddenMSE,
    LayerPairs,
    Relation,
    StateTerm,
)
from dew.losses.student_loss import StudentLoss
from dew.losses.term import Schedule, Term
from dew.losses.uld import ULD

TERMS: Mapping[str, Callable[[float], Term]] = {
    "kl": lambda t: ForwardKL(temperature=t),
    "reverse_kl": lambda t: ReverseKL(temperature=t),
    "jsd": lambda t: ScaledJSD(temperature=t),
    "skew": lambda t: SkewKL(temperature=t),
    "tvd": lambda t: TVD(temperature=t),
    "soft_ce": lambda t: SoftCrossEntropy(temperature=t),
    "sampled": lambda t: Sampled(temperature=t),
    "uld": lambda t: ULD(temperature=t),
    "ce": lambda _: CrossEntropy(),
    "student_loss": lambda _: StudentLoss(),
}
"""Terms over logits and the student's own loss, each made from the temperature."""

RELATION_HEADS = 8
"""Heads that hidden states are split into for the `relation` term."""

STATE_TERMS: Mapping[str, Callable[[LayerPairs], StateTerm]] = {
    "hidden": lambda pairs: HiddenMSE(pairs=pairs),
    "cosine": lambda pairs: HiddenCosine(pairs=pairs),
    # MiniLMv2 relates one layer, the last.
    "relation": lambda pairs: Relation(pairs=pairs[-1:], heads=RELATION_HEADS),
    "attention": lambda pairs: AttentionMap(pairs=pairs, mean_heads=True),
}
"""Terms over hidden states or attention of paired layers."""


def parse_terms(
    words: Sequence[str],
    *,
    temperature: float,
    pairs: Callable[[], LayerPairs],
    accumulation: int = 1,
) -> tuple[Term, ...]:
    """Parses words such as `kl`, `ce=0.5` or `kl=linear:1->0.1@1000` into terms.

    A scheduled weight names its shape, its two ends, and the number of steps between
    them. Those are commits of `accumulation` micro-batches each.

    Args:
        words: names of terms, each with an optional weight.
        temperature: of every term that has one.
        pairs: returns the layer pairs; called only for a term that needs them.
        accumulation: micro-batches in a commit.

    Raises:
        ValueError: a word is not a term, or its weight is not a number; all are named.
    """
    faults: list[str] = []
    terms: list[Term] = []
    for word in words:
        name, _, number = word.partition("=")
        weight = _weight(word, number, accumulation, faults)
        if name in TERMS:
            terms.append(replace(TERMS[name](temperature), weight=weight))
        elif name in STATE_TERMS:
            terms.append(replace(STATE_TERMS[name](pairs()), weight=weight))
        else:
            known = [*TERMS, *STATE_TERMS]
            near = get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            faults.append(f"{name!r} is none of {', '.join(known)}{meant}")
    if faults:
        raise ValueError("--terms: " + "; ".join(faults))
    return tuple(terms)


MOVING = re.compile(r"(\w+):([^:@]+)->([^:@]+)@(\d+)")


def _weight(word: str, number: str, accumulation: int, faults: list[str]) -> Schedule:
    """Parses a constant, or a schedule of the accepted micro-batches."""
    if not number:
        return 1.0
    moving = MOVING.fullmatch(number)
    try:
        if moving is None:
            return float(number)
        shape, first, last, steps = moving.groups()
        ends = float(first), float(last)
    except ValueError:
        faults.append(f"the weight of {word!r} is not a number")
        return 1.0
    if shape not in ("linear", "cosine") or not int(steps):
        faults.append(f"{word!r} must read NAME=linear:1.0->0.1@1000, or cosine:…")
        return 1.0
    if shape == "linear":
        return optax.linear_schedule(*ends, int(steps) * accumulation)
    return _cosine(*ends, int(steps) * accumulation)


def _cosine(first: float, last: float, steps: int) -> Schedule:
    """Returns a schedule from `first` to `last` along half a cosine."""
    fall = optax.cosine_decay_schedule(1.0, steps)
    return lambda step: last + (first - last) * fall(step)
