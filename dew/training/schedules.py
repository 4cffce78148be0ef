"""Learning-rate schedules: warmup, then constant, linear, cosine or a late decay.

A schedule is a function of the number of commits made so far: the first commit uses
`schedule(0)`. The formulas are those of transformers' `get_*_schedule`, but a run that
goes past `steps` stays at the floor, where some of transformers' schedules rise again.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, TypeAlias

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

Shape: TypeAlias = Literal["linear", "cosine", "1-sqrt"]
"""The curve of a decay from 1 to 0."""

SHAPES: Mapping[Shape, Callable[[Float[Array, ""]], Float[Array, ""]]] = {
    "linear": lambda passed: 1 - passed,
    "cosine": lambda passed: (1 + jnp.cos(jnp.pi * passed)) / 2,
    "1-sqrt": lambda passed: 1 - jnp.sqrt(passed),
}
"""The factor of the rate after the fraction `passed` of a decay."""


def constant(peak: float, *, warmup: int = 0) -> optax.Schedule:
    """Builds a schedule that rises from 0 to `peak` in `warmup` commits and stays."""
    _check(peak, {"warmup": warmup}, 0.0)

    def rate(commits: ArrayLike) -> Float[Array, ""]:
        return peak * _warmup_fraction(commits, warmup)

    return rate


def linear(
    peak: float, *, steps: int, warmup: int = 0, min_ratio: float = 0.0
) -> optax.Schedule:
    """Builds a schedule that rises to `peak`, then falls linearly.

    It ends at `min_ratio * peak` after `steps` commits.
    """
    return _rise_and_decay(peak, "linear", steps, warmup, 0, min_ratio, 0.0)


def cosine(
    peak: float, *, steps: int, warmup: int = 0, min_ratio: float = 0.0
) -> optax.Schedule:
    """Builds a schedule that rises to `peak`, then falls along half a cosine.

    It ends at `min_ratio * peak` after `steps` commits. Loshchilov and Hutter, "SGDR:
    Stochastic Gradient Descent with Warm Restarts" (2017), equation 5, one period.

    >>> schedule = cosine(1.0, steps=8, warmup=4)
    >>> [round(float(schedule(commit)), 3) for commit in (0, 2, 4, 6, 8)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return _rise_and_decay(peak, "cosine", steps, warmup, 0, min_ratio, 0.0)


def wsd(
    peak: float,
    *,
    steps: int,
    warmup: int = 0,
    decay: int | None = None,
    min_ratio: float = 0.0,
    shape: Shape = "1-sqrt",
) -> optax.Schedule:
    """Builds a warmup-stable-decay schedule, which falls in its last `decay` commits.

    `decay` is a tenth of `steps` where None. The warmup starts at the floor
    `min_ratio * peak`, as in transformers, not at 0. Hu et al., "MiniCPM" (2024),
    section 4; the shape `1-sqrt` is from Hägele et al., "Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations" (2024), section 4.

    >>> schedule = wsd(1.0, steps=20, warmup=4, decay=4)
    >>> [round(float(schedule(commit)), 3) for commit in (0, 2, 4, 16, 17, 20)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    # At least one commit: a tenth of a short run would round to no decay at all.
    decay = max(1, steps // 10) if decay is None else decay
    stable = steps - warmup - decay
    return _rise_and_decay(peak, shape, steps, warmup, stable, min_ratio, min_ratio)


def _constant_in_a_run(
    peak: float, *, steps: int, warmup: int = 0, min_ratio: float = 0.0
) -> optax.Schedule:
    """Builds `constant` with the signature that the schedules by name share."""
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


def schedule_by_name(
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


def _rise_and_decay(
    peak: float,
    shape: Shape,
    steps: int,
    warmup: int,
    stable: int,
    floor: float,
    start: float,
) -> optax.Schedule:
    """Builds the schedule of all shapes; `start` and `floor` are fractions of `peak`.

    It rises from `start`, stays for `stable` commits, and decays to `floor`.
    """
    decay = steps - warmup - stable
    _check(
        peak, {"warmup": warmup, "the stable part": stable, "the decay": decay}, floor
    )

    def rate(commits: ArrayLike) -> Float[Array, ""]:
        commits = jnp.asarray(commits)
        # Clipped on both sides: 0 through the stable part, 1 past the end of the run.
        # max(decay, 1): without a decay the division must still be legal.
        passed = jnp.clip((commits - warmup - stable) / max(decay, 1), 0.0, 1.0)
        rise = start + (1 - start) * _warmup_fraction(commits, warmup)
        fall = floor + (1 - floor) * SHAPES[shape](passed)
        return peak * jnp.where(commits < warmup, rise, fall)

    return rate


def _warmup_fraction(commits: ArrayLike, warmup: int) -> Float[Array, ""]:
    """Returns the fraction of the warmup that is over; 1 without a warmup."""
    # 1 + commits where warmup is 0: the warmup must be over at commit 0 already.
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
