"""Every tolerance of the tests, with the largest difference seen where it is known."""

from typing import Any

import jax
import numpy as np

RTOL = {
    "float32": 1e-5,
    "float64": 1e-12,
    "bfloat16": 1e-2,
    # Float32 sums in another order: experts, adapters, the lowered road.
    "reordered": 1e-4,
    # Chunked sums against dense ones in float32.
    "chunked": 1e-6,
    # A float32 JSD against float64 on the same log-probabilities: 8e-7.
    "close float32": 1.5e-6,
    # Float32 presets against the projects' formulas in float64 torch.
    "preset": 1e-6,
    # Float64 central difference against backward: 3e-10.
    "difference": 1e-8,
    # Float64, logits moved by 100 before the loss: 7e-15.
    "shifted float64": 1e-13,
    # Float64, the textbook JSD over a beta of 1e-6, which itself cancels: 1e-10.
    "beta": 1e-9,
    # Float64, a beta 1e-12 from an end: 5e-11.
    "near an end": 1e-9,
}
"""Relative tolerances, by dtype and by what is compared. Never loosened to pass."""

ATOL = {
    # Float32 values of order one, and those that cancel to less.
    "float32": 1e-5,
    "small float32": 1e-6,
    "chunked": 1e-6,
    # Self-distillation, values and gradients: 3e-17 and, in float32, 6e-8.
    "self float64": 1e-12,
    "self float32": 1e-7,
    # Float64 closed forms of order one: 4e-16.
    "gradient": 1e-14,
    # Logits of a folder read by two ways of storing it.
    "stored": 1e-4,
    # A teacher's share of a loss, estimated from draws.
    "drawn": 0.03,
}
"""Absolute tolerances, for what is near zero or of order one."""

# Largest difference seen: 7.8e-7 on logits of size 2, where a leak makes 0.9 to 2.6.
ATOL_PACKED = 1e-6
"""Between the logits of a document packed among others and of the same one alone."""

OPTIMIZER = 1e-6
"""Optimizer steps and learning rates against torch; the largest seen is 3.1e-7."""

ROPE = 2e-5
"""Cosines and sines up to position 192 against torch's, whose own frequencies are
correctly rounded less often; the largest seen is 7.2e-6."""

LOGITS = 2e-5
"""Largest difference of float32 logits from torch's, as a part of the largest logit.
The largest seen is 1e-6."""

SLOPE = 1e-3
"""Gradients against float32 central differences; the largest seen is 2.3e-4."""

HALF = 0.02
"""A loss in bfloat16 against float32, as a part of it; the largest seen is 7e-3."""

ACCUMULATION = 1e-6
"""A window of microbatches against one large batch; the largest seen is 3e-7."""

AVERAGE = 1e-6
"""Absolute difference of averaged weights from the recursion written out, beside the
relative tolerance of float32."""

AVERAGE_1000 = 1e-4
"""An average after a thousand commits against float64, as a part of its way. The
largest seen is 4.7e-5, at a decay of 0.9999."""

CHECK_GRADS = 1e-2
"""Gradients against the float32 differences of `jax.test_util.check_grads`."""

SHARES = {"hidden": 0.01, "masked": 0.03, "unchanged": 0.025}
"""Shares of 32768 tokens that `hide_tokens` draws; five standard deviations."""


def assert_trees_close(got: Any, want: Any, *, rtol: float, atol: float = 0.0) -> None:
    """Two trees of one structure with leaves that agree; the first that does not."""
    pairs, treedef = jax.tree.flatten_with_path(want)
    assert jax.tree.structure(got) == treedef
    for (path, wanted), leaf in zip(pairs, jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(
            np.asarray(leaf, np.float64),
            np.asarray(wanted, np.float64),
            rtol=rtol,
            atol=atol,
            err_msg=jax.tree_util.keystr(path),
        )


ZOO_OUTPUT = 1e-5
"""Largest difference of a lowered model from torch, in standard deviations of the
output. The largest seen over the zoo is 3.6e-6."""

ZOO_GRADIENT = 1e-5
"""Largest difference of a weight's gradient from autograd's, as a part of the largest
gradient. The largest seen over the zoo is 2.4e-6."""

FAMILY_GRADIENT = 2e-5
"""Largest difference of a gradient of a family's weights from torch's, as a part of the
largest gradient."""

FAMILY_HALF = 1.25
"""How much further a family's bfloat16 logits may be from float32 than torch's own."""

SMOLLM2 = {
    # Absolute, over 512 tokens of text; the largest seen is 8.7e-5, torch's distance
    # from float64 7e-5.
    "logits": 1e-4,
    # By norm, tensor by tensor, from float64 autograd; the largest seen is 4.7e-5.
    "gradient": 1e-4,
    # Absolute, on weights of size one.
    "adamw": 1e-6,
}
"""The real model against torch, float32."""

CUT = 2e-5
"""Logits of a pruned model against torch's on its own export."""

ROADS = 1e-3
"""Logits after training by the lowered road against the native one."""

MUON = 0.35
"""Singular values of a Muon update, around one scale: five Newton-Schulz steps."""

DROPOUT_SPREAD = 0.4
"""The variance of a dropout rate over draws, around that of independent draws."""

NEW_ROWS = 1e-3
"""Added vocabulary rows around the mean of the others, as a part of the largest."""

NEAR_END = 2e-4
"""A scaled JSD close to an end of its beta, as a part of the divergence there."""

DROPOUT_SHARE = 0.0065
"""The share that dropout zeroes of 40,000 entries: three standard deviations."""

GRADIENT_TIMES = 4
"""Times a call's tolerance that the gradient of one op may differ from torch's."""

DRAW_ERRORS = 4
"""Standard errors that the mean and the spread of a draw may be from torch's."""
