"""Package faces: what `__init__` exports, how it is documented, what it imports."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.test_layout import MODULES, ROOT

FACES = [name for name, path in MODULES.items() if path.name == "__init__.py"]
"""Every package; `dew.bridges` needs torch, which the tests have."""

PUBLIC = [
    (face, name) for face in FACES for name in importlib.import_module(face).__all__
]


@pytest.mark.parametrize("face", FACES)
def test_a_face_exports_exactly_what_it_lists(face: str) -> None:
    listed = importlib.import_module(face).__all__
    tree = ast.parse(MODULES[face].read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "etils"
        for alias in node.names
    }
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    assert list(listed) == sorted(listed, key=_as_ruff_sorts)
    assert set(listed) <= imported | assigned


def _as_ruff_sorts(name: str) -> tuple[int, str]:
    """Constants first, then classes, then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize(("face", "name"), PUBLIC)
def test_every_public_name_has_a_docstring(face: str, name: str) -> None:
    value = getattr(importlib.import_module(face), name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value), f"{face}.{name} has no docstring"
    elif not isinstance(value, ModuleType):
        assert _documented(face, name), f"no text follows the assignment of {name}"


def _documented(face: str, name: str) -> bool:
    """Whether a string literal follows the assignment of a constant or alias."""
    tree = ast.parse(MODULES[face].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            if name in {alias.name for alias in node.names}:
                return _documented(node.module, name)
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        targets: list[Any] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    return False


def public_definitions(path: Path) -> list[tuple[str, str]]:
    """Name and docstring of a file's public classes, functions and methods."""
    found: list[tuple[str, str]] = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            if node.name.startswith("_"):
                continue
            name = f"{prefix}{node.name}"
            found.append((name, ast.get_docstring(node) or ""))
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


@pytest.mark.parametrize("name", sorted(MODULES))
def test_public_docstrings_open_with_a_whole_phrase(name: str) -> None:
    short = [
        f"{path}: {first!r}"
        for path, text in public_definitions(MODULES[name])
        for first in text.splitlines()[:1]
        if len(first.split()) < 5
    ]
    assert not short


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_importing_dew_loads_none_of_the_libraries_that_it_uses() -> None:
    heavy = "jax flax optax orbax grain numpy tokenizers torch transformers rich tyro"
    loaded = _python("import sys, dew; print(*sys.modules)").split()
    assert not set(heavy.split()) & set(loaded)


def test_every_face_but_torchs_resolves_without_fcntl_or_torch() -> None:
    """Windows has no fcntl, and a user of `converters` alone has no torch."""
    faces = [face for face in FACES if not face.startswith("dew.bridges")]
    code = (
        "import importlib, sys\n"
        "for name in ('fcntl', 'torch', 'torch2jax', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        f"for face in {faces!r}:\n"
        "    module = importlib.import_module(face)\n"
        "    for name in module.__all__:\n"
        "        getattr(module, name)\n"
    )
    _python(code)
