"""What the tests share: tolerances in one place, tiny models, references."""

RTOL = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2}
"""Relative tolerances by dtype. They are never loosened to pass."""
