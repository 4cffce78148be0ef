"""Second names that torch has for one op, which its graphs keep apart."""

from collections.abc import Mapping

from dew.bridges.lowering.ops.op import Op

ALIASES: Mapping[str, str] = {
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "clip": "clamp",
    "concatenate": "cat",
    "divide": "div",
    "fix": "trunc",
    "ger": "outer",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "linalg_matmul": "matmul",
    "moveaxis": "movedim",
    "negative": "neg",
    "not_equal": "ne",
    "row_stack": "vstack",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_erfinv": "erfinv",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_gammaln": "lgamma",
    "special_log1p": "log1p",
    "special_logit": "logit",
    "special_logsumexp": "logsumexp",
    "subtract": "sub",
}


def alias_entries(table: Mapping[str, Op]) -> dict[str, Op]:
    """Returns the table's ops once more, under their second names."""
    overloads = [name.split(".") for name in table]
    return {
        f"{space}.{alias}.{overload}": table[f"{space}.{name}.{overload}"]
        for alias, plain in ALIASES.items()
        for space, name, overload in overloads
        if (space, name) == ("aten", plain)
    }
