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
from dew.bridges.handover import fill_module as fill_module
from dew.bridges.handover import state_dict_of as state_dict_of
from dew.bridges.handover import variables_of as variables_of
from dew.bridges.loading import load_lowered as load_lowered
from dew.bridges.lowered import Lowered as Lowered
from dew.bridges.lowering import lower as lower
from dew.bridges.register import implements as implements
from dew.bridges.teachers import LiveTeacher as LiveTeacher
from dew.bridges.torch_module import as_torch_module as as_torch_module
