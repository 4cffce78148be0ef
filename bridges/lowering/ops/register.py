"""The one table a program may add to: torch ops that dew does not know."""

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
    and the result is cast to the dtype torch gave it. It replaces ours if we have one::

        @dew.bridges.implements(torch.ops.aten.erfcx.default)
        def erfcx(x):
            return jnp.exp(x * x) * jax.scipy.special.erfc(x)
    """

    def register(function: F) -> F:
        _ADDED[str(overload)] = function
        return function

    return register


def find(name: str) -> Op | None:
    """Returns the op of that name, an added one before our own."""
    return _ADDED.get(name) or TABLE.get(name)
