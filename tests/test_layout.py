"""Who may import whom: the packages' direction, no cycles, torch in one place only."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ORDER = (
    ("dew.__main__",),
    ("dew.cli",),
    ("dew.api", "dew"),
    ("dew.bridges",),
    ("dew.converters",),
    ("dew.training",),
    ("dew.objectives",),
    ("dew.tasks", "dew.data"),
    ("dew.nn", "dew.losses"),
    ("dew.source", "dew.state", "dew.runs"),
    ("dew.tree",),
    ("dew.typing",),
)
"""From the top down; a package imports its own, and what stands below it."""

TORCH = {"torch", "torch2jax", "transformers", "torchax", "accelerate"}


def modules() -> dict[str, Path]:
    """Every module of ours by its import name."""
    found = {}
    for top, prefix in (("dew", ""), ("bridges", "dew."), ("converters", "dew.")):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] in (("dew", "bridges"), ("dew", "converters")):
                continue
            name = prefix + ".".join(parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[str]:
    """All modules that a file imports, under TYPE_CHECKING and in functions as well."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in inner}
    return names


def rank(name: str) -> int:
    """How far up a module stands; of two packages that fit, the longer name counts."""
    ranked = [
        (len(package), place)
        for place, packages in enumerate(ORDER)
        for package in packages
        if name == package or name.startswith(f"{package}.")
    ]
    return max(ranked)[1]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_only_its_own_package_and_what_stands_below(name: str) -> None:
    ours = {i for i in imports(MODULES[name]) if i in MODULES}
    upward = sorted(
        i
        for i in ours
        if rank(i) < rank(name) or (rank(i) == rank(name) and not _kin(i, name))
    )
    assert not upward, f"{name} imports {upward}"


def _kin(one: str, other: str) -> bool:
    """Whether both are of the same package, or the front of the whole."""
    return one.split(".")[:2] == other.split(".")[:2] or "dew" in (one, other)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {n: {i for i in imports(p) if i in MODULES} for n, p in MODULES.items()}
    while leaves := {n for n, wanted in graph.items() if not wanted & set(graph)}:
        graph = {n: wanted for n, wanted in graph.items() if n not in leaves}
    assert not graph, f"circles among {sorted(graph)}"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_torch_is_imported_in_bridges_alone(name: str) -> None:
    tops = {i.split(".")[0] for i in imports(MODULES[name])}
    assert name.startswith("dew.bridges") or not tops & TORCH


def test_torch2jax_is_imported_in_one_file() -> None:
    users = [n for n, p in MODULES.items() if "torch2jax" in imports(p)]
    assert len(users) == 1


def test_orbax_is_imported_in_one_file() -> None:
    users = [
        n for n, p in MODULES.items() if any(i.startswith("orbax") for i in imports(p))
    ]
    assert users == ["dew.training.checkpoint"]
