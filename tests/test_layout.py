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
    ("dew.batch", "dew.source", "dew.state", "dew.runs"),
    ("dew.tree",),
    ("dew.typing",),
    ("dew.processes", "dew.native_messages"),
)
"""From the top down; a package imports its own, and what stands below it."""

INSIDE = {
    "dew.converters": (
        ("surgery",),
        ("lora",),
        ("save",),
        ("load", "model_card"),
        ("pretrained",),
        ("open_folder", "tied_weights"),
        ("families", "gguf"),
        ("folder", "mapping", "config"),
        ("errors",),
    ),
    "dew.bridges": (
        ("loading",),
        ("certificate", "teachers"),
        ("lowering",),
        ("module_state", "torch_module"),
        ("dlpack",),
        ("dtypes", "names"),
    ),
    "dew.objectives": (
        ("distillation", "metrics"),
        ("balanced_moe", "router_loss"),
        (
            "barlow_twins",
            "causal_lm",
            "jepa",
            "masked_lm",
            "seq2seq_lm",
            "supervised",
        ),
        ("tokens", "model"),
        ("masking",),
        ("base",),
    ),
}
"""The same inside three packages: modules and folders of each, from the top down."""

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


def _places(package: str) -> dict[str, int]:
    return {
        f"{package}.{entry}": place
        for place, entries in enumerate(INSIDE[package])
        for entry in entries
    }


@pytest.mark.parametrize("package", INSIDE)
def test_every_entry_of_a_package_has_a_place_in_its_order(package: str) -> None:
    entries = {".".join(n.split(".")[:3]) for n in MODULES if n.startswith(package)}
    assert entries - {package} == set(_places(package))


@pytest.mark.parametrize("package", INSIDE)
def test_inside_a_package_imports_point_downward(package: str) -> None:
    places = _places(package)
    upward = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        for other in imports(path)
        if name.startswith(f"{package}.") and other.startswith(f"{package}.")
        for mine, theirs in [(_entry(name), _entry(other))]
        if mine != theirs and places[theirs] <= places[mine]
    ]
    assert not upward


def _entry(name: str) -> str:
    """The file or folder of its package that a module is, or lies in."""
    return ".".join(name.split(".")[:3])


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


def _literal_tolerances(path: Path) -> list[int]:
    """Lines where a tolerance is a number and not a name of the one table."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        values: list[ast.expr] = []
        if isinstance(node, ast.keyword) and node.arg in ("rtol", "atol", "abs", "rel"):
            values = [node.value]
        elif isinstance(node, ast.Compare):
            values = node.comparators
        lines += [
            value.lineno
            for value in values
            if isinstance(value, ast.Constant)
            and isinstance(value.value, float)
            and 0 < value.value < 0.01
        ]
    return lines


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: path.stem
)
def test_tolerances_stand_in_the_one_table(path: Path) -> None:
    assert not _literal_tolerances(path)
