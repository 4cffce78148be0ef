"""Logarithms of probabilities, computed where floating point keeps their digits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Scalar = float | Float[Array, ""]
"""A number known before the step, or a schedule's value inside it."""


def widened(x: Array) -> Array:
    """Returns `x` in float32, or as it is where it is wider."""
    # NumPy's rule: JAX's own refuses to promote where promotion is set to strict.
    return x.astype(np.promote_types(x.dtype, np.float32))


def log_softmax(
    logits: Float[Array, "*batch vocab"], temperature: Scalar = 1.0
) -> Float[Array, "*batch vocab"]:
    """Log-probabilities at `temperature`, in float32 or wider.

    A logit of minus infinity is a class that does not exist: its log-probability is
    minus infinity and no gradient passes through it.
    """
    # Widen before dividing: softmax in mixed precision makes a JSD negative
    # (-1.6e-3 where 4.5e-5 is true).
    wide = widened(logits)
    exists = wide > -jnp.inf
    scaled = jnp.where(exists, wide, 0) / jnp.asarray(temperature, wide.dtype)
    return jax.nn.log_softmax(scaled, axis=-1, where=exists)


def log1mexp(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """log(1 - exp(x)): the log of the mass left over by a log-mass `x`.

    An `x` of zero, or above it by rounding, leaves nothing: minus infinity. Mächler,
    "Accurately Computing log(1 - exp(-|a|))" (2012), has the two branches.
    """
    some = x < 0
    x = jnp.where(some, x, -1)
    near = x > -math.log(2)
    left = jnp.where(
        near,
        jnp.log(-jnp.expm1(jnp.where(near, x, -1))),
        jnp.log1p(-jnp.exp(jnp.where(near, -1, x))),
    )
    return jnp.where(some, left, -jnp.inf)


def log_ratio(
    a: Float[Array, "*batch classes"], s: Float[Array, "*batch classes"]
) -> Float[Array, "*batch classes"]:
    """Returns a - s, with 0 where both are minus infinity and neither has the class."""
    both = (a > -jnp.inf) & (s > -jnp.inf)
    finite = jnp.where(both, a, 0) - jnp.where(both, s, 0)
    one_sided = jnp.where(a == s, 0, jnp.where(a > s, jnp.inf, -jnp.inf))
    return jnp.where(both, finite, one_sided.astype(finite.dtype))


def log_mixture_ratio(
    d: Float[Array, "*batch classes"], share: Scalar
) -> Float[Array, "*batch classes"]:
    """log(share * exp(d) + 1 - share): a mixture against its second part.

    With d = log p - log q this is log(M / q) of M = share * p + (1 - share) * q. Near
    d = 0, and for a small share, log M - log q would cancel to noise.
    """
    share = jnp.asarray(share, d.dtype)
    near = jnp.abs(d) < 1
    close = jnp.log1p(share * jnp.expm1(jnp.where(near, d, 0)))
    # A share of zero takes no part, even of an infinite ratio.
    part = jnp.where(share > 0, jnp.where(near, 0, d) + jnp.log(share), -jnp.inf)
    return jnp.where(near, close, jnp.logaddexp(part, jnp.log1p(-share)))


def relative_entropy(
    p: Float[Array, "*batch classes"],
    m: Float[Array, "*batch classes"],
    x: Float[Array, "*batch classes"],
) -> Float[Array, "*batch"]:
    """KL(p / m) in nats from p, m and x = log(m / p), summed over the classes.

    Sums p log(p/m) - p + m, which is never negative and whose sum is the same, because
    p and m both sum to one. Where p and m are close, that is p (exp(x) - 1 - x) and is
    computed as such; the textbook sum would keep few or no digits of it.
    """
    near = jnp.abs(x) < 1
    inner = p * _exp_less_line(jnp.where(near, x, 0))
    # 0 log(0 / m) is 0, whatever m.
    drop = p * jnp.where(near | (p <= 0), 0, x)
    return jnp.sum(jnp.where(near, inner, m - p - drop), axis=-1)


def _exp_less_line(x: Array) -> Array:
    """exp(x) - 1 - x for |x| < 1, accurate in relative terms."""
    tiny = jnp.abs(x) < 0.1
    # Ten terms of the series reach float64 for |x| < 0.1, where the closed form has
    # lost two digits at the edge and all of them at zero.
    series = jnp.ones_like(x)
    for n in range(11, 2, -1):
        series = 1 + jnp.where(tiny, x, 0) / n * series
    return jnp.where(tiny, x * x / 2 * series, jnp.expm1(x) - x)
