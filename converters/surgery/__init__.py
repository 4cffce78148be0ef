"""Smaller and larger models from a trained one: pruning, new tokens."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.converters.surgery.prune_depth import prune_layers
    from dew.converters.surgery.prune_widths import Widths
    from dew.converters.surgery.vocabulary import (
        Padded,
        extend_vocabulary,
        pad_vocabulary,
    )

__all__ = [
    "Padded",
    "Widths",
    "extend_vocabulary",
    "pad_vocabulary",
    "prune_layers",
]
