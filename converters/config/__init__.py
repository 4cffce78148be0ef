"""From config.json to the configuration of a native model, field by field."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.converters.config.fields import (
        Derived,
        Field,
        Inert,
        MultiUse,
        Only,
        Product,
        Quotient,
        Same,
        Use,
    )
    from dew.converters.config.rope import RopeFields

__all__ = [
    "Derived",
    "Field",
    "Inert",
    "MultiUse",
    "Only",
    "Product",
    "Quotient",
    "RopeFields",
    "Same",
    "Use",
]
