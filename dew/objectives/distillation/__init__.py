"""Teacher-student training as one objective, its teachers, and its self-checks."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.objectives.distillation.check import (
        Check,
        check_distillation,
        check_objective,
    )
    from dew.objectives.distillation.cross_tokenizer import CrossTokenizerTeacher
    from dew.objectives.distillation.encoder_states import EncoderStates, mean_pooled
    from dew.objectives.distillation.objective import Distillation
    from dew.objectives.distillation.on_policy import OnPolicy
    from dew.objectives.distillation.teachers import (
        ModelTeacher,
        PrecomputedTeacher,
        Teacher,
    )
    from dew.objectives.distillation.variables import student_variables

__all__ = [
    "Check",
    "CrossTokenizerTeacher",
    "Distillation",
    "EncoderStates",
    "ModelTeacher",
    "OnPolicy",
    "PrecomputedTeacher",
    "Teacher",
    "check_distillation",
    "check_objective",
    "mean_pooled",
    "student_variables",
]
