"""Table of loss identities in docs/guides/distillation.md, measured in float64.

python -m docs.generate.identities    # measures and rewrites the table
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from docs.generate.page import table_lines, write_table
from tests import conftest as conftest
from tests.losses import reference as ref
from tests.losses.test_identities import every, jsds, kls, skews

PAGE = Path(__file__).parents[1] / "guides" / "distillation.md"
COLUMNS = ("identity", "largest error")


def table() -> list[str]:
    """Returns the lines of the table, every identity measured anew."""
    rows = ((name, f"{error:.1e}") for name, error in measured_errors())
    return table_lines(COLUMNS, rows)


def measured_errors() -> Iterator[tuple[str, float]]:
    """Yields every identity with its largest error, under 64-bit JAX."""
    with jax.enable_x64(True):
        yield from _errors()


def largest_error(result: ArrayLike, expected: ArrayLike) -> float:
    """Returns the largest difference, relative where the expected value exceeds 1."""
    a, b = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    return float((np.abs(a - b) / np.maximum(1, np.abs(b))).max())


def equal_models(dtype: DTypeLike) -> float:
    """Largest loss or gradient of any divergence where student and teacher agree."""
    z = ref.pair()[0].astype(dtype)
    results = [every(z, z, t).values() for t in (1, 2, 4)]
    return max(
        largest_error(x, np.zeros(x.shape))
        for losses in results
        for pair in losses
        for x in pair
    )


def gradient_errors() -> float:
    """Largest error of a loss's gradient against its central difference."""
    z, y = ref.pair()
    worst = 0.0
    for name, (_, slope) in every(z, y, 3).items():
        slope = np.asarray(slope)
        norm = float(np.linalg.norm(slope))
        difference = ref.central_difference(
            lambda y, name=name: every(z, y, 3)[name][0].sum(), y, slope / norm, 1e-5
        )
        worst = max(worst, abs(difference / norm - 1))
    return worst


def shifted_logits() -> float:
    """Largest change of a loss when constants are added to all logits of a position."""
    z, y = ref.pair()
    shift = np.array([3.0, -7.0, 100.0])[:, None]
    shifted, plain = every(z + shift, y - 2 * shift, 1), every(z, y, 1)
    return max(largest_error(shifted[name][0], plain[name][0]) for name in plain)


def _errors() -> Iterator[tuple[str, float]]:
    z, y = ref.pair()
    a, s = ref.log_softmax(z), ref.log_softmax(y)
    p, q = np.exp(a), np.exp(s)
    forward, reverse, soft = kls(z, y, 1.0)
    half, raw = jsds(z, y, 0.3)[1][0], jsds(z, y, 0.3)[0]
    m = np.log(0.3 * p + 0.7 * q)
    yield (
        "equal logits on both sides: every loss and gradient is 0, T 1, 2, 4",
        equal_models(np.float64),
    )
    yield "equal logits in float32", equal_models(np.float32)
    yield "every gradient is the slope of its loss", gradient_errors()
    yield "constants added to logits change nothing", shifted_logits()
    yield (
        "forward KL is the textbook sum",
        largest_error(forward[0], ref.forward_kl(z, y)),
    )
    yield "its gradient is T (q - p)", largest_error(forward[1], q - p)
    slope = q * ((s - a) - ref.kl(s, a)[..., None])
    yield (
        "the reverse KL's gradient is q ((log q - log p) - KL)",
        largest_error(reverse[1], slope),
    )
    slope = 0.7 * q * ((s - m) - ref.kl(s, m)[..., None])
    yield (
        "the JSD's gradient is (1 - b) q ((log q - log m) - KL)",
        largest_error(raw[1], slope),
    )
    entropies = ref.entropy(m) - 0.3 * ref.entropy(a) - 0.7 * ref.entropy(s)
    yield "JSD = H(m) - b H(p) - (1 - b) H(q)", largest_error(raw[0], entropies)
    yield (
        "scaled JSD, sides and b swapped",
        largest_error(jsds(y, z, 0.7)[1][0], half),
    )
    yield (
        "scaled JSD at b = 0 is the forward KL",
        largest_error(jsds(z, y, 0.0)[1][0], ref.forward_kl(z, y)),
    )
    yield (
        "scaled JSD at b = 1 is the reverse KL",
        largest_error(jsds(z, y, 1.0)[1][0], ref.reverse_kl(z, y)),
    )
    skew = skews(z, y, 0.1)["forward"][0]
    yield (
        "skew KL is the KL to the mixture",
        largest_error(skew, ref.skew(z, y, 0.1, "forward")),
    )
    yield (
        "soft cross-entropy = KL + H(p)",
        largest_error(soft[0], forward[0] + ref.entropy(a)),
    )


if __name__ == "__main__":
    write_table(PAGE, table())
