"""One small declarative file per architecture."""

from collections.abc import Mapping

from dew.converters.families.llama import LLAMA
from dew.converters.family import Family

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (LLAMA,)}
"""The architectures of the native road, by `model_type`."""
