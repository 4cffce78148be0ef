"""Torch beside JAX: lowering, tensors without a copy, teachers, certificates."""

if __name__ != "dew.bridges":
    raise ImportError(f"import dew.bridges instead of {__name__}")

from dew.bridges.dlpack import to_jax as to_jax
from dew.bridges.dlpack import to_torch as to_torch
from dew.bridges.errors import LoweringError as LoweringError
from dew.bridges.errors import LoweringExportError as LoweringExportError
from dew.bridges.errors import LoweringParityError as LoweringParityError
from dew.bridges.errors import LoweringShapeError as LoweringShapeError
from dew.bridges.errors import MissingOpsError as MissingOpsError
from dew.bridges.lowered import Lowered as Lowered
from dew.bridges.lowering import lower as lower
from dew.bridges.register import implements as implements
