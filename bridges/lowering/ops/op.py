"""What an op is here, and how torch's arithmetic differs from jax's defaults."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import jax

Op: TypeAlias = Callable[..., Any]
"""Takes what the overload's schema takes, arrays for tensors; returns its results.

Keywords that say where or how a tensor is stored (`device`, `layout`, `pin_memory`,
`memory_format`, …) never arrive, dtypes arrive as jax's, and the result is cast to the
dtype that torch gave it, so an op need not repeat torch's promotion rules.
"""


@contextmanager
def torch_arithmetic() -> Iterator[None]:
    """Lets operands of unlike dtype and rank meet, whatever the process has set.

    Torch broadcasts and promotes silently; a program that forbids both to its own code
    must still be able to run a lowered graph.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
