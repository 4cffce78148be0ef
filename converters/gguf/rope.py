"""RoPE scaling of a GGUF file, as the `rope_scaling` of a config.json."""

import math
from typing import Any

import numpy as np

from dew.converters.gguf.rows import Facts


def rope_scaling(facts: Facts, theta: float, dim: int) -> dict[str, object] | None:
    """Returns the scaling dict of a rotary embedding, or None without scaling.

    `theta` is the base of its frequencies and `dim` the rotated width of a head.

    Raises:
        ValueError: a type of scaling that is unknown or lacks a parameter, or a table
            of factors that is not Llama 3's.
    """
    # Read so that it counts as accounted for: it describes training, not the maths.
    facts.get("rope.scaling.finetuned")
    kind = facts.get("rope.scaling.type", "none")
    factors = facts.values("rope_freqs.weight")
    if kind == "linear":
        return {
            "rope_type": "linear",
            "factor": _required(facts, "rope.scaling.factor"),
        }
    if kind == "yarn":
        betas = {
            name: facts.get(f"rope.scaling.yarn_{name}")
            for name in ("beta_fast", "beta_slow")
        }
        return {
            "rope_type": "yarn",
            "factor": _required(facts, "rope.scaling.factor"),
            "original_max_position_embeddings": _required(
                facts, "rope.scaling.original_context_length"
            ),
            **{name: value for name, value in betas.items() if value is not None},
        }
    if kind not in ("none", "longrope"):
        raise ValueError(
            f"rope.scaling.type must be none, linear, yarn or longrope, got {kind!r}"
        )
    return None if factors is None else _llama3_scaling(factors, theta, dim)


def _required(facts: Facts, key: str) -> Any:
    value = facts.get(key)
    if value is None:
        kind = facts.get("rope.scaling.type")
        raise ValueError(f"rope.scaling.type {kind!r} needs {facts.name}.{key}")
    return value


def _llama3_scaling(factors: np.ndarray, theta: float, dim: int) -> dict[str, object]:
    """Finds the parameters of Llama 3 scaling from the stored table of factors.

    The table depends on the original length and the two frequency factors only by
    their ratios, so the low one may be taken as 1; every published model has 4 and
    8192 for the others.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    # The factors' maximum is that of the lowest frequencies, which are scaled in full.
    waves = 2 * math.pi * theta ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    implied = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(implied, factors, rtol=1e-5, atol=0):
        raise ValueError(
            "rope_freqs.weight must be the factors of Llama 3 scaling with low factor "
            f"1, high factor 4 and original length 8192, got {factors.tolist()}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
