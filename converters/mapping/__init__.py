"""Stored tensors to variables and back, by one rule a tensor."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.converters.mapping.build import build_table
    from dew.converters.mapping.rules import Prefix, Rule
    from dew.converters.mapping.table import Table

__all__ = [
    "Prefix",
    "Rule",
    "Table",
    "build_table",
]
