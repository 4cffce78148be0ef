"""The bridge between PyTorch and JAX for people who train models."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.api import (
        CertificationError,
        adapt,
        certify,
        extend_vocabulary,
        load,
        pad_vocabulary,
        save,
    )
    from dew.converters.lora.config import Lora
    from dew.converters.pretrained import Pretrained
    from dew.source import Source
    from dew.state import TrainState

__all__ = [
    "CertificationError",
    "Lora",
    "Pretrained",
    "Source",
    "TrainState",
    "adapt",
    "certify",
    "extend_vocabulary",
    "load",
    "pad_vocabulary",
    "save",
]
