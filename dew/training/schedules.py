"""Learning rates over a run: warmup, then flat, a slope, a cosine or a late decay.

A schedule is a function of the number of commits made so far: the first commit is taken
at `schedule(0)`. The formulas are those of transformers' `get_*_schedule`, but a run
that goes past `steps` stays at the floor, where some of theirs climb again.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, TypeAlias

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

Shape: TypeAlias = Literal["linear", "cosine", "1-sqrt"]
"""The curve that a decay follows from 1 down to 0."""

SHAPES: Mapping[Shape, Callable[[Float[Array, ""]], Float[Array, ""]]] = {
    "linear": lambda passed: 1 - passed,
    "cosine": lambda passed: (1 + jnp.cos(jnp.pi * passed)) / 2,
    "1-sqrt": lambda passed: 1 - jnp.sqrt(passed),
}
"""What is left of the rate when the fraction `passed` of a decay lies behind."""


def constant(peak: float, *, warmup: int = 0) -> optax.Schedule:
    """Climbs from 0 to `peak` over `warmup` commits and stays there."""
    _check(peak, {"warmup": warmup}, 0.0)

    def rate(commits: ArrayLike) -> Float[Array, ""]:
        return peak * _climbed(commits, warmup)

    return rate


def linear(
    peak: float, *, steps: int, warmup: int = 0, min_ratio: float = 0.0
) -> optax.Schedule:
    """Climbs to `peak`, then falls in a straight line to `min_ratio * peak`."""
    return _decaying(peak, "linear", steps, warmup, 0, min_ratio, 0.0)


def cosine(
    peak: float, *, steps: int, warmup: int = 0, min_ratio: float = 0.0
) -> optax.Schedule:
    """Climbs to `peak`, then follows half a cosine down to `min_ratio * peak`.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts"
    (2017), equation 5, one period.
    """
    return _decaying(peak, "cosine", steps, warmup, 0, min_ratio, 0.0)


def wsd(
    peak: float,
    *,
    steps: int,
    warmup: int = 0,
    decay: int | None = None,
    min_ratio: float = 0.0,
    shape: Shape = "1-sqrt",
) -> optax.Schedule:
    """Climbs, stays at `peak`, and decays over the last `decay` commits.

    `decay` is a tenth of `steps` where None. The climb starts at the floor
    `min_ratio * peak`, as in transformers, not at 0. Hu et al., "MiniCPM" (2024),
    section 4; the shape `1-sqrt` is from Hägele et al., "Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations" (2024), section 4.
    """
    decay = max(1, steps // 10) if decay is None else decay
    stable = steps - warmup - decay
    return _decaying(peak, shape, steps, warmup, stable, min_ratio, min_ratio)


def _constant_in_a_run(
    peak: float, *, steps: int, warmup: int = 0, min_ratio: float = 0.0
) -> optax.Schedule:
    """Gives `constant` the signature that names share; it has no floor to go to."""
    if min_ratio:
        raise ValueError(
            f"min_ratio is {min_ratio}, but a constant schedule never decays; leave it "
            f"out or choose another schedule"
        )
    return constant(peak, warmup=warmup)


SCHEDULES: Mapping[str, Callable[..., optax.Schedule]] = {
    "constant": _constant_in_a_run,
    "linear": linear,
    "cosine": cosine,
    "wsd": wsd,
    "wsd-linear": partial(wsd, shape="linear"),
    "wsd-cosine": partial(wsd, shape="cosine"),
}
"""Schedules by the names of the command line."""


def named(
    name: str, peak: float, *, steps: int, warmup: int = 0, min_ratio: float = 0.0
) -> optax.Schedule:
    """Builds the schedule of that name for a run of `steps` commits.

    Raises:
        ValueError: no schedule has that name, or a number is out of range.
    """
    if name not in SCHEDULES:
        raise ValueError(
            f"no schedule is called {name!r}; choose from {', '.join(SCHEDULES)}"
        )
    return SCHEDULES[name](peak, steps=steps, warmup=warmup, min_ratio=min_ratio)


def _decaying(
    peak: float,
    shape: Shape,
    steps: int,
    warmup: int,
    stable: int,
    floor: float,
    start: float,
) -> optax.Schedule:
    """Climbs from `start` to 1, rests, decays to `floor`; all of them times `peak`."""
    decay = steps - warmup - stable
    _check(
        peak, {"warmup": warmup, "the stable part": stable, "the decay": decay}, floor
    )

    def rate(commits: ArrayLike) -> Float[Array, ""]:
        commits = jnp.asarray(commits)
        passed = jnp.clip((commits - warmup - stable) / max(decay, 1), 0.0, 1.0)
        climb = start + (1 - start) * _climbed(commits, warmup)
        fall = floor + (1 - floor) * SHAPES[shape](passed)
        return peak * jnp.where(commits < warmup, climb, fall)

    return rate


def _climbed(commits: ArrayLike, warmup: int) -> Float[Array, ""]:
    """The fraction of a warmup that lies behind; 1 where there is none."""
    # 1 + commits where warmup is 0: the climb must be over at commit 0 already.
    return jnp.clip((commits + int(warmup == 0)) / max(warmup, 1), 0.0, 1.0)


def _check(peak: float, parts: Mapping[str, int], floor: float) -> None:
    faults = [
        f"{part} must be at least 0 commits, got {length}"
        for part, length in parts.items()
        if length < 0
    ]
    if not peak >= 0:
        faults.append(f"the peak learning rate must be at least 0, got {peak}")
    if not 0 <= floor <= 1:
        faults.append(f"min_ratio must lie in [0, 1], got {floor}")
    if faults:
        raise ValueError("the schedule cannot be built: " + "; ".join(faults))
