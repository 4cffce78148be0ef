"""Registration of JAX functions as the lowering of torch ops that dew lacks."""

from collections.abc import Callable
from typing import TypeVar

from torch._ops import OpOverload

from dew.bridges.lowering.ops import TABLE, Op

F = TypeVar("F", bound=Op)
_ADDED: dict[str, Op] = {}


def implements(overload: OpOverload) -> Callable[[F], F]:
    """Registers a JAX function as the lowering of one torch op, before `lower` runs.

    The function takes what the overload's schema takes, arrays for tensors and JAX
    dtypes for torch's, and returns arrays; `device`, `layout` and the like are dropped
    and the result is cast to the dtype that torch gave it. It takes precedence over
    dew's own lowering of the op, if there is one.

    >>> import jax, torch
    >>> import jax.numpy as jnp
    >>> @implements(torch.ops.aten.special_erfcx.default)
    ... def erfcx(x: jax.Array) -> jax.Array:
    ...     return jnp.exp(x * x) * jax.scipy.special.erfc(x)
    """

    def register(function: F) -> F:
        _ADDED[str(overload)] = function
        return function

    return register


def find(name: str) -> Op | None:
    """Returns the op of that name; a registered one precedes dew's own."""
    return _ADDED.get(name) or TABLE.get(name)
