"""Torch beside JAX: lowering, tensors without a copy, teachers, certificates."""

if __name__ != "dew.bridges":
    raise ImportError(f"import dew.bridges instead of {__name__}")

from dew.bridges.dlpack import to_jax as to_jax
from dew.bridges.dlpack import to_torch as to_torch
from dew.bridges.loading.load import load_lowered as load_lowered
from dew.bridges.lowering.errors import LoweringError as LoweringError
from dew.bridges.lowering.errors import LoweringExportError as LoweringExportError
from dew.bridges.lowering.errors import LoweringParityError as LoweringParityError
from dew.bridges.lowering.errors import LoweringShapeError as LoweringShapeError
from dew.bridges.lowering.errors import MissingOpsError as MissingOpsError
from dew.bridges.lowering.lower import lower as lower
from dew.bridges.lowering.model import Lowered as Lowered
from dew.bridges.lowering.ops.register import implements as implements
from dew.bridges.module_state import fill_module as fill_module
from dew.bridges.module_state import state_dict_of as state_dict_of
from dew.bridges.module_state import variables_of as variables_of
from dew.bridges.teachers.live import LiveTeacher as LiveTeacher
from dew.bridges.torch_module import as_torch_module as as_torch_module
