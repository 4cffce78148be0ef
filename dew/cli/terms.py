"""Loss terms by the names that a command line gives them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

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
)
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
}
"""Terms over the two sides' scores, made at a temperature."""

HIDDEN: Mapping[str, Callable[[LayerPairs], Any]] = {
    "hidden": lambda pairs: HiddenMSE(pairs=pairs),
    "cosine": lambda pairs: HiddenCosine(pairs=pairs),
}
"""Terms over hidden states of paired blocks."""

RELATION_HEADS = 8


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What `--terms` named, sorted by what each looks at."""

    terms: tuple[Term, ...]
    hidden: tuple[HiddenMSE | HiddenCosine, ...]
    relations: tuple[Relation, ...]
    maps: tuple[AttentionMap, ...]


def chosen(
    words: Sequence[str],
    *,
    temperature: float,
    pairs: Callable[[], LayerPairs],
    accumulation: int = 1,
) -> Chosen:
    """Reads words such as `kl`, `ce=0.5` or `kl=linear:1->0.1@1000`: a term's weight.

    A weight that moves names its shape, its ends, and the steps in which it gets from
    one to the other. Those are commits of `accumulation` microbatches each.

    Raises:
        ValueError: a word is no term, or its weight is no number; all are named.
    """
    faults: list[str] = []
    found: dict[str, list[Any]] = {"terms": [], "hidden": [], "relations": []}
    found["maps"] = []
    for word in words:
        name, _, number = word.partition("=")
        weight = _weight(word, number, accumulation, faults)
        if name in TERMS:
            term: Any = TERMS[name](temperature)
            found["terms"].append(replace(term, weight=weight))
        elif name in HIDDEN:
            found["hidden"].append(replace(HIDDEN[name](pairs()), weight=weight))
        elif name == "relation":
            one = Relation(pairs=pairs()[-1:], heads=RELATION_HEADS, weight=weight)
            found["relations"].append(one)
        elif name == "attention":
            found["maps"].append(
                AttentionMap(pairs=pairs(), weight=weight, mean_heads=True)
            )
        else:
            known = [*TERMS, *HIDDEN, "relation", "attention"]
            near = get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            faults.append(f"{name!r} is none of {', '.join(known)}{meant}")
    if faults:
        raise ValueError("--terms: " + "; ".join(faults))
    return Chosen(**{name: tuple(terms) for name, terms in found.items()})


MOVING = re.compile(r"(\w+):([^:@]+)->([^:@]+)@(\d+)")


def _weight(word: str, number: str, accumulation: int, faults: list[str]) -> Schedule:
    """A constant, or a schedule of the accepted microbatches."""
    if not number:
        return 1.0
    moving = MOVING.fullmatch(number)
    try:
        if moving is None:
            return float(number)
        shape, first, last, steps = moving.groups()
        ends = float(first), float(last)
    except ValueError:
        faults.append(f"the weight of {word!r} is no number")
        return 1.0
    if shape not in ("linear", "cosine") or not int(steps):
        faults.append(f"{word!r} must read NAME=linear:1.0->0.1@1000, or cosine:…")
        return 1.0
    if shape == "linear":
        return optax.linear_schedule(*ends, int(steps) * accumulation)
    return _cosine(*ends, int(steps) * accumulation)


def _cosine(first: float, last: float, steps: int) -> Schedule:
    """From one to the other along half a cosine."""
    fall = optax.cosine_decay_schedule(1.0, steps)
    return lambda step: last + (first - last) * fall(step)
