"""Inference tasks: what an objective's `pipeline` returns for a trained state."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.tasks.base import Task
    from dew.tasks.generation import TextGeneration
    from dew.tasks.scoring import Scoring
    from dew.tasks.seq2seq_generation import TargetGeneration

__all__ = [
    "Scoring",
    "TargetGeneration",
    "Task",
    "TextGeneration",
]
