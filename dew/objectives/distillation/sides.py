"""What can be a student or a teacher, and the message for anything else."""

import os
from typing import Any

from typing_extensions import get_protocol_members

from dew.data.teacher_cache import TeacherCache
from dew.objectives.base import Objective
from dew.source import Source
from dew.typing import Model


def objective_faults(role: str, value: object) -> list[str]:
    """Returns what keeps a value from being an objective that scores tokens."""
    if not isinstance(value, Objective):
        kind = _kind(value) or f"a {type(value).__name__}"
        return [f"{role} must be an objective, got {kind}"]
    if type(value).predict is Objective.predict:
        return [
            f"{role} must score tokens, and {type(value).__name__} lacks predict; "
            "define it, or give an objective that has it, such as CausalLM or MaskedLM"
        ]
    return []


def teacher_faults(role: str, value: object, protocol: type) -> list[str]:
    """Returns what keeps a value from being a teacher: its kind, or missing members.

    Args:
        role: what the value is given as, for the message.
        value: an objective, an implementation of the protocol, or anything else.
        protocol: the protocol of teachers, whose members the value must have.
    """
    if isinstance(value, Objective):
        return objective_faults(role, value)
    rule = f"{role} must be an objective or a Teacher"
    kind = _kind(value)
    if kind is not None:
        return [f"{rule}, got {kind}"]
    missing = [m for m in sorted(get_protocol_members(protocol)) if not _has(value, m)]
    if not missing:
        return []
    return [f"{rule}, and {type(value).__name__} lacks {', '.join(missing)}"]


def _kind(value: object) -> str | None:
    """Returns what a value is and what to give in its place; None where unknown."""
    name = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}: give an instance of it"
    if isinstance(value, str | os.PathLike):
        address = os.fspath(value)
        return f"the address {address!r}: give {_over(f'dew.load({address!r})')}"
    if isinstance(value, Source):
        return f"a loaded model, {name}: give {_over('the model')}"
    if _is_torch_module(value):
        return (
            f"the torch module {name}: give {_over('dew.load(FOLDER)')} of its folder, "
            "or dew.bridges.LiveTeacher(module=…).teacher, which scores the batches"
        )
    if isinstance(value, TeacherCache):
        return (
            "a TeacherCache: give PrecomputedTeacher(policy=cache.binding.policy, "
            "temperature=cache.binding.temperature), and CachedBatches as the data"
        )
    if _has(value, "teacher"):
        return f"a {name}: give its `teacher`"
    if isinstance(value, Model):
        return (
            f"the model {name} without variables and loss: give "
            f"{_over('Source(model=…, variables=…)')}"
        )
    return None


def _over(source: str) -> str:
    return f"CausalLM(source={source}, seq_len=…) or another objective"


def _has(value: object, member: str) -> bool:
    """Whether the value has the member; a property is not evaluated to know it."""
    return member in dir(value)


def _is_torch_module(value: Any) -> bool:
    """Whether the value is a torch module, told by where its classes come from.

    Asking torch would import it into every distillation.
    """
    return any(c.__module__.startswith("torch.nn.") for c in type(value).__mro__)
