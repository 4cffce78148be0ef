"""Torch beside JAX: lowering, tensors without a copy, teachers, certificates."""

if __name__ != "dew.bridges":
    raise ImportError(f"import dew.bridges instead of {__name__}")

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.bridges.certificate.certify import Certificate, continue_with_torch
    from dew.bridges.dlpack import to_jax, to_torch
    from dew.bridges.loading.load import load_lowered
    from dew.bridges.lowering.errors import (
        LoweringError,
        LoweringExportError,
        LoweringParityError,
        LoweringShapeError,
        MissingOpsError,
    )
    from dew.bridges.lowering.lower import lower
    from dew.bridges.lowering.model import Lowered
    from dew.bridges.lowering.ops.register import implements
    from dew.bridges.module_state import fill_module, state_dict_of, variables_of
    from dew.bridges.teachers.live import LiveTeacher
    from dew.bridges.torch_module import as_torch_module

__all__ = [
    "Certificate",
    "LiveTeacher",
    "Lowered",
    "LoweringError",
    "LoweringExportError",
    "LoweringParityError",
    "LoweringShapeError",
    "MissingOpsError",
    "as_torch_module",
    "continue_with_torch",
    "fill_module",
    "implements",
    "load_lowered",
    "lower",
    "state_dict_of",
    "to_jax",
    "to_torch",
    "variables_of",
]
