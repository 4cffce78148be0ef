"""Fields that a config class of transformers declares, and those that its code reads.

A field of a config.json that is neither has no effect in transformers. Both sets are
taken from the source text of the installed version.
"""

import ast
import dataclasses
import inspect
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import transformers
from transformers import PreTrainedConfig, cache_utils, masking_utils
from transformers import modeling_rope_utils as rope_utils

from dew.converters.config.known_fields import KnownFields

SHARED_CODE = (cache_utils, masking_utils)
"""Modules that read fields of any model's config."""

TECHNICAL = {"compile_config", "per_layer_config"}
"""Attributes of a config object that no config.json states."""


@cache
def known_fields(kind: type[PreTrainedConfig]) -> KnownFields:
    """Returns the fields of a config class, and those that its modeling code reads."""
    file = Path(inspect.getfile(kind))
    declared = {f.name for f in dataclasses.fields(kind)} | set(kind.attribute_map)
    declared |= _popped(file) | _popped(Path(inspect.getfile(PreTrainedConfig)))
    read = set(kind.attribute_map) | _read(file, "self")
    for code in file.parent.glob("modeling_*.py"):
        read |= _read(code)
    has_rope = hasattr(kind, "rope_parameters")
    for module in (*SHARED_CODE, *([rope_utils] if has_rope else [])):
        read |= _read(Path(inspect.getfile(module)))
    read = {name for name in read if _is_field(kind, name)}
    return KnownFields(
        version=transformers.__version__,
        declared=frozenset(declared),
        read=frozenset(read),
    )


@cache
def rope_keys() -> frozenset[str]:
    """Returns the keys of a rope dict that transformers reads, for any rope type."""
    tree = ast.parse(Path(inspect.getfile(rope_utils)).read_text("utf-8"))
    return frozenset(
        text
        for node in ast.walk(tree)
        for target, text in _keys(node)
        if "rope" in target or target == "self"
    )


def _is_field(kind: type[PreTrainedConfig], name: str) -> bool:
    is_private = name.startswith("_") or name in TECHNICAL
    return not is_private and not callable(getattr(kind, name, None))


@cache
def _read(file: Path, config: str = "config") -> frozenset[str]:
    """Returns the attributes that a source file reads of variables named `config`."""

    def is_config(node: ast.expr) -> bool:
        return ast.unparse(node).rsplit(".", 1)[-1].endswith(config)

    names = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and is_config(node.value):
            names.add(node.attr)
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "hasattr")
            and is_config(node.args[0])
        ):
            names |= _constants(node.args[1:2])
    return frozenset(names)


def _popped(file: Path) -> set[str]:
    """Returns the keyword arguments that a config's source takes by name."""
    tree = ast.parse(file.read_text("utf-8"))
    return {
        text
        for node in ast.walk(tree)
        for target, text in _keys(node)
        if target == "kwargs"
    }


def _keys(node: ast.AST) -> Iterable[tuple[str, str]]:
    """Returns name and key of `name["key"]`, `name.get("key")`, `name.pop("key")`."""
    if isinstance(node, ast.Subscript):
        return [(ast.unparse(node.value), key) for key in _constants([node.slice])]
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("get", "pop", "setdefault")
    ):
        target = ast.unparse(node.func.value)
        return [(target, key) for key in _constants(node.args[:1])]
    return []


def _constants(nodes: Iterable[ast.expr]) -> set[str]:
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
