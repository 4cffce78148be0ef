"""The places of student, teachers and projectors in a distillation's variables."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from dew.objectives.base import Objective, Step
from dew.objectives.distillation.teachers import Teacher
from dew.tree import FROZEN, flatten, unflatten
from dew.typing import Path, Variables

TEACHER = "teacher"
"""The collection of the teachers' variables, each under its number."""

PROJECTORS = "projectors"
"""The place below `params` of the trained projectors, which no export holds."""


def student_variables(params: Variables) -> dict[str, Any]:
    """Returns the variables without teachers and projectors."""
    student = {name: tree for name, tree in params.items() if name != TEACHER}
    if "params" in student:
        live = student["params"].items()
        student["params"] = {name: tree for name, tree in live if name != PROJECTORS}
    return student


def student_step(step: Step) -> Step:
    """Returns the step as the student takes it: its average without the teachers."""
    if step.ema is None:
        return step
    return replace(step, ema=student_variables(step.ema))


def shared_leaves(
    student: Objective[Any, Any], teachers: Sequence[Teacher]
) -> tuple[frozenset[Path], ...]:
    """Returns, for each teacher, the paths of leaves that the student has frozen.

    They must be the same arrays when loaded, and of one dtype in the step.
    """
    supplied = student.held_variables()
    if supplied is None:
        return tuple(frozenset() for _ in teachers)
    key = jax.random.key(0)
    ours = flatten(supplied)
    made = jax.eval_shape(student.init, key, supplied)
    frozen = flatten({"params": made.get(FROZEN, {})})
    shared = []
    for teacher in teachers:
        theirs = flatten(teacher.held_variables() or {})
        same = [p for p in theirs if p in frozen and ours.get(p) is theirs[p]]
        cast = jax.eval_shape(teacher.init, key, unflatten(theirs)) if same else {}
        in_step = {p: leaf.dtype for p, leaf in flatten(cast).items()}
        shared.append(frozenset(p for p in same if in_step[p] == frozen[p].dtype))
    return tuple(shared)


def drop_paths(tree: Variables, paths: frozenset[Path]) -> Variables:
    """Returns the variables without the leaves at `paths`."""
    if not paths:
        return tree
    return unflatten({p: leaf for p, leaf in flatten(tree).items() if p not in paths})
