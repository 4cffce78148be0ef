"""The table of identities in docs/guides/distillation.md, measured anew.

python -m tests.test_docs_identities     # prints the table
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.losses import reference as ref
from tests.losses.test_identities import every, jsds, kls, skews

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "distillation.md"


def gap(got: Any, want: Any) -> float:
    """The largest difference, relative where what is wanted is not small."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float((np.abs(got - want) / np.maximum(1, np.abs(want))).max())


def self_loss(dtype: Any) -> float:
    z = ref.pair()[0].astype(dtype)
    found = [every(z, z, t).values() for t in (1, 2, 4)]
    return max(
        gap(x, np.zeros(x.shape)) for each in found for pair in each for x in pair
    )


def slopes() -> float:
    """Of every loss: the central difference of its value against its gradient."""
    z, y = ref.pair()
    worst = 0.0
    for name, (_, slope) in every(z, y, 3).items():
        slope = np.asarray(slope)
        norm = float(np.linalg.norm(slope))
        found = ref.central_difference(
            lambda y, name=name: every(z, y, 3)[name][0].sum(), y, slope / norm, 1e-5
        )
        worst = max(worst, abs(found / norm - 1))
    return worst


def shifted() -> float:
    z, y = ref.pair()
    shift = np.array([3.0, -7.0, 100.0])[:, None]
    moved, still = every(z + shift, y - 2 * shift, 1), every(z, y, 1)
    return max(gap(moved[name][0], still[name][0]) for name in still)


def rows() -> Iterator[tuple[str, float]]:
    z, y = ref.pair()
    a, s = ref.log_softmax(z), ref.log_softmax(y)
    p, q = np.exp(a), np.exp(s)
    forward, reverse, soft = kls(z, y, 1.0)
    half, raw = jsds(z, y, 0.3)[1][0], jsds(z, y, 0.3)[0]
    m = np.log(0.3 * p + 0.7 * q)
    yield (
        "a student taught by itself: every loss and gradient, T 1, 2, 4",
        self_loss(np.float64),
    )
    yield "the same in float32", self_loss(np.float32)
    yield "the gradient is that of the value, every loss", slopes()
    yield "constants added to logits change nothing", shifted()
    yield "forward KL is the textbook sum", gap(forward[0], ref.forward_kl(z, y))
    yield "its gradient is T (q - p)", gap(forward[1], q - p)
    want = q * ((s - a) - ref.kl(s, a)[..., None])
    yield "the reverse KL's gradient is q ((log q - log p) - KL)", gap(reverse[1], want)
    want = 0.7 * q * ((s - m) - ref.kl(s, m)[..., None])
    yield "the JSD's gradient is (1 - b) q ((log q - log m) - KL)", gap(raw[1], want)
    want = ref.entropy(m) - 0.3 * ref.entropy(a) - 0.7 * ref.entropy(s)
    yield "JSD = H(m) - b H(p) - (1 - b) H(q)", gap(raw[0], want)
    yield "scaled JSD, sides and b swapped", gap(jsds(y, z, 0.7)[1][0], half)
    yield (
        "scaled JSD at b = 0 is the forward KL",
        gap(jsds(z, y, 0.0)[1][0], ref.forward_kl(z, y)),
    )
    yield (
        "scaled JSD at b = 1 is the reverse KL",
        gap(jsds(z, y, 1.0)[1][0], ref.reverse_kl(z, y)),
    )
    skewed = skews(z, y, 0.1)["forward"][0]
    yield (
        "skew KL is the KL to the mixture",
        gap(skewed, ref.skew(z, y, 0.1, "forward")),
    )
    yield "soft cross-entropy = KL + H(p)", gap(soft[0], forward[0] + ref.entropy(a))


def table() -> list[str]:
    with jax.enable_x64(True):
        return [f"| {name} | {error:.1e} |" for name, error in rows()]


@pytest.mark.full
def test_the_documented_identities_hold_to_the_errors_that_are_stated() -> None:
    text = PAGE.read_text(encoding="utf-8")
    with jax.enable_x64(True):
        for name, error in rows():
            (line,) = [x for x in text.splitlines() if x.startswith(f"| {name} |")]
            stated = float(line.split("|")[2])
            # Another machine sums in another order.
            assert error <= 10 * max(stated, 1e-16), (name, error, stated)


if __name__ == "__main__":
    print("\n".join(table()))
