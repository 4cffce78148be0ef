"""Folders of any architecture that transformers has, loaded by the lowered road."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.bridges.loading.load import load_lowered
    from dew.bridges.loading.pickles import unpickle

__all__ = [
    "load_lowered",
    "unpickle",
]
