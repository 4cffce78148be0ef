"""Torch beside JAX: lowering, tensors without a copy, teachers, certificates."""

if __name__ != "dew.bridges":
    raise ImportError(f"import dew.bridges instead of {__name__}")
