"""Torch models that score batches beside the training step."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.bridges.teachers.batches import LiveBatches, live_batches
    from dew.bridges.teachers.live import LiveTeacher

__all__ = [
    "LiveBatches",
    "LiveTeacher",
    "live_batches",
]
