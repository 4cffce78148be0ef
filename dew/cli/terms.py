"""Loss terms by their names on the command line."""

import math
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
    faults = term_faults(words)
    if faults:
        raise ValueError("; ".join(faults))
    terms: list[Term] = []
    for name, weight in map(_split, words):
        made = TERMS[name](temperature) if name in TERMS else STATE_TERMS[name](pairs())
        terms.append(replace(made, weight=_schedule(weight, accumulation)))
    return tuple(terms)


def term_faults(words: Sequence[str]) -> list[str]:
    """Returns what is wrong with the words of `--terms`, without any model."""
    if not words:
        return ["--terms needs at least one term, such as kl"]
    faults = []
    for word in words:
        name, weight = _split(word)
        if name not in (*TERMS, *STATE_TERMS):
            known = [*TERMS, *STATE_TERMS]
            near = get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            faults.append(f"--terms: {name!r} is none of {', '.join(known)}{meant}")
        if not _is_weight(weight):
            faults.append(
                f"--terms: the weight in {word!r} must be a number, as in kl=0.5, or a "
                "schedule, as in kl=linear:1.0->0.1@1000 or kl=cosine:1.0->0.1@1000"
            )
    return faults


def term_names(words: Sequence[str]) -> set[str]:
    """Returns the names of the terms in `--terms`, known or not."""
    return {_split(word)[0] for word in words}


def _split(word: str) -> tuple[str, str]:
    """Returns a term's name, and the text of its weight."""
    name, equals, weight = word.partition("=")
    return name, weight if equals else "1"


MOVING = re.compile(r"(linear|cosine):([^:@]+)->([^:@]+)@0*([1-9]\d*)")
"""The form of a scheduled weight: its shape, first and last value, and steps."""


def _is_weight(text: str) -> bool:
    moving = MOVING.fullmatch(text)
    return all(map(_is_number, moving.group(2, 3) if moving else (text,)))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _schedule(weight: str, accumulation: int) -> Schedule:
    """Returns a constant, or a schedule of the accepted micro-batches."""
    moving = MOVING.fullmatch(weight)
    if moving is None:
        return float(weight)
    shape, first, last, steps = moving.groups()
    ends = float(first), float(last)
    if shape == "linear":
        return optax.linear_schedule(*ends, int(steps) * accumulation)
    return _cosine(*ends, int(steps) * accumulation)


def _cosine(first: float, last: float, steps: int) -> Schedule:
    """Returns a schedule from `first` to `last` along half a cosine."""
    fall = optax.cosine_decay_schedule(1.0, steps)
    return lambda step: last + (first - last) * fall(step)
