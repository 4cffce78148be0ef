"""Torch modules as JAX functions, through torch.export."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.bridges.lowering.errors import (
        LoweringError,
        LoweringExportError,
        LoweringParityError,
        LoweringShapeError,
        MissingOpsError,
    )
    from dew.bridges.lowering.model import Lowered
    from dew.bridges.lowering.ops.register import implements

__all__ = [
    "Lowered",
    "LoweringError",
    "LoweringExportError",
    "LoweringParityError",
    "LoweringShapeError",
    "MissingOpsError",
    "implements",
]
