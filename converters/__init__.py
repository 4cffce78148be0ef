"""Hugging Face folders to JAX variables and back, without torch."""

if __name__ != "dew.converters":
    raise ImportError(f"import dew.converters instead of {__name__}")

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.converters.load import UnknownFamilyError, load_native
    from dew.converters.pretrained import Pretrained
    from dew.converters.save import export

__all__ = [
    "Pretrained",
    "UnknownFamilyError",
    "export",
    "load_native",
]
