"""Where in a distillation's variables the student, teachers and projectors lie."""

from typing import Any

from dew.typing import Variables

TEACHER = "teacher"
"""The collection that teachers' variables are held in, each under its number."""

PROJECTORS = "projectors"
"""Where below `params` the maps between widths train; no export holds them."""


def student_variables(params: Variables) -> dict[str, Any]:
    """The variables without teachers and projectors."""
    kept = {name: tree for name, tree in params.items() if name != TEACHER}
    if "params" in kept:
        live = kept["params"].items()
        kept["params"] = {name: tree for name, tree in live if name != PROJECTORS}
    return kept
