"""An export reloaded in transformers and compared with our own forward pass."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.bridges.certificate.certify import Certificate, continue_with_torch

__all__ = [
    "Certificate",
    "continue_with_torch",
]
