"""Conversion of GGUF files to Hugging Face folders."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.converters.gguf.convert import folder_from_gguf

__all__ = [
    "folder_from_gguf",
]
