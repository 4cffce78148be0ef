"""Where in a distillation's variables the student, teachers and projectors lie."""

from collections.abc import Sequence
from typing import Any

import jax

from dew.objectives.base import Objective
from dew.objectives.distillation.teachers import Teacher
from dew.tree import FROZEN, flatten, unflatten
from dew.typing import Path, Variables

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


def shared_leaves(
    student: Objective[Any, Any], teachers: Sequence[Teacher]
) -> tuple[frozenset[Path], ...]:
    """Of each teacher, the paths of leaves that the student holds frozen anyway.

    They must be the same arrays when loaded, and of one dtype in the step.
    """
    supplied = student.held_variables()
    if supplied is None:
        return tuple(frozenset() for _ in teachers)
    key = jax.random.key(0)
    ours = flatten(supplied)
    made = jax.eval_shape(student.init, key, supplied)
    frozen = flatten({"params": made.get(FROZEN, {})})
    found = []
    for teacher in teachers:
        theirs = flatten(teacher.held_variables() or {})
        same = [p for p in theirs if p in frozen and ours.get(p) is theirs[p]]
        cast = jax.eval_shape(teacher.init, key, unflatten(theirs)) if same else {}
        kept = flatten(cast)
        found.append(frozenset(p for p in same if kept[p].dtype == frozen[p].dtype))
    return tuple(found)


def drop_paths(tree: Variables, paths: frozenset[Path]) -> Variables:
    """The tree without the leaves at `paths`."""
    if not paths:
        return tree
    return unflatten({p: leaf for p, leaf in flatten(tree).items() if p not in paths})
