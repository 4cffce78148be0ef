"""README and docs: examples, links and generated tables agree with the code."""

import ast
import importlib
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import dew
import dew.bridges
from dew.bridges.lowering.ops import FROM_TORCH2JAX
from docs.generate import families, identities, torch2jax_ops
from docs.generate.page import read_table, replaced_text
from tests.support import hf_models as hf

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FACES = [
    file.parent
    for folder in ("dew", "bridges", "converters")
    for file in sorted((ROOT / folder).rglob("__init__.py"))
    if "__all__" in file.read_text(encoding="utf-8")
]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
RUN = "<!-- run by tests/test_docs.py -->\n"
# The one module without `__all__` that users import from: the contract.
CONTRACT = "dew.objectives.base"


def _blocks(mark: str = "") -> list[Any]:
    """The Python examples of all pages that follow a mark, named by page and line."""
    blocks = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            if text[: match.start()].endswith(mark):
                place = f"{page.relative_to(ROOT)}:{line}"
                blocks.append(pytest.param(textwrap.dedent(match[2]), id=place))
    return blocks


BLOCKS = _blocks()


@pytest.mark.parametrize("code", BLOCKS)
def test_examples_import_public_names_that_exist(code: str) -> None:
    faults = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
            faults += [name for name in names if not _is_public(name)]
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            public = importlib.import_module(module)
            names = [name.name for name in node.names]
            if not _is_public(module):
                faults.append(module)
            faults += [f"{module}.{n}" for n in names if not hasattr(public, n)]
            listed = getattr(public, "__all__", names)
            faults += [f"{module}.{n}" for n in names if n not in listed]
    assert faults == []


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("code", _blocks(RUN))
def test_marked_examples_run(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf.save(hf.llama(), tmp_path / "FOLDER")
    (tmp_path / "TEXTS").mkdir()
    for i in range(40):
        words = " ".join(f"w{(i + j) % 90}" for j in range(50))
        (tmp_path / "TEXTS" / f"{i}.txt").write_text(words)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def _is_public(module: str) -> bool:
    """Whether examples may import a module: another project's, or a package face."""
    if module.split(".")[0] != "dew":
        return True
    return module == CONTRACT or hasattr(importlib.import_module(module), "__all__")


def test_attributes_of_the_package_in_examples_exist() -> None:
    faults = [
        name
        for parameters in BLOCKS
        for name in re.findall(r"\bdew((?:\.[a-z]\w*)+)\(", str(parameters.values[0]))
        if not _has(dew, name[1:])
    ]
    assert faults == []


def _has(owner: object, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def test_every_package_in_examples_has_a_reference_page() -> None:
    pages = (DOCS / "reference").glob("*.md")
    documented = {
        x for p in pages for x in re.findall(r"^::: (\S+)", p.read_text(), re.M)
    }
    examples = "\n".join(str(parameters.values[0]) for parameters in BLOCKS)
    imported = set(re.findall(r"^(?:from|import) (dew\S*)", examples, re.M))
    assert sorted(imported - documented) == []


@pytest.mark.parametrize("package", FACES)
def test_no_module_hides_a_public_name(package: Path) -> None:
    # Importing a module sets it as an attribute of its package, over a lazy name. An
    # eager import binds the name again right after.
    if "lazy_api_imports" not in (package / "__init__.py").read_text(encoding="utf-8"):
        return
    name = ".".join(package.relative_to(ROOT).parts)
    name = name if name.startswith("dew") else f"dew.{name}"
    public = importlib.import_module(name).__all__
    modules = {x.stem for x in package.iterdir() if x.suffix == ".py" or x.is_dir()}
    assert sorted(modules & set(public)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_and_paths_in_prose_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"`(dew(?:\.\w+)+)", text))
    folders = "dew|bridges|converters|tests|examples|benchmarks|docs"
    paths = set(re.findall(rf"`((?:{folders})/[\w/.]+)`", text))
    faults = [name for name in names if not _resolves(name)]
    assert sorted(faults + [x for x in paths if not (ROOT / x).exists()]) == []


def _resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute below one."""
    module, _, _ = dotted.rpartition(".")
    try:
        importlib.import_module(dotted)
    except ImportError:
        return bool(module) and _resolves(module) and _has(dew, dotted[4:])
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    assert [target for target in _links(page) if not target.exists()] == []


def test_every_page_is_reached_from_the_index() -> None:
    reached, queue = set(), [DOCS / "index.md"]
    while queue:
        page = queue.pop()
        reached.add(page)
        queue += [x for x in _links(page) if x.suffix == ".md" and x not in reached]
    assert sorted(set(DOCS.rglob("*.md")) - reached) == []


def test_the_readme_leads_to_the_index_and_to_every_guide() -> None:
    guides = {DOCS / "index.md", *(DOCS / "guides").glob("*.md")}
    assert sorted(guides - set(_links(ROOT / "README.md"))) == []


def _links(page: Path) -> list[Path]:
    """The files that a page links to by relative path."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [link.partition("#")[0] for link in LINK.findall(text)]
    return [
        (page.parent / target).resolve()
        for target in targets
        if target and "://" not in target
    ]


def test_the_table_of_families_is_what_its_generator_writes() -> None:
    page = families.PAGE
    assert page.read_text(encoding="utf-8") == replaced_text(page, families.table())


@pytest.mark.full
def test_the_table_of_torch2jaxs_ops_is_what_its_generator_writes() -> None:
    page = torch2jax_ops.PAGE
    written = replaced_text(page, torch2jax_ops.table())
    assert page.read_text(encoding="utf-8") == written


def test_the_page_on_torch2jax_says_of_every_op_whose_it_is() -> None:
    *rows, last = read_table(torch2jax_ops.PAGE, torch2jax_ops.COLUMNS[0])[2:]
    whose = dict(re.findall(r"`([\w.]+)` \| (\w+) \|", "\n".join(rows)))
    whose |= dict.fromkeys(re.findall(r"`([\w.]+)`", last), "dew")
    owned = {name: "torch2jax" for name in FROM_TORCH2JAX}
    assert whose == {n: owned.get(n, "dew") for n in torch2jax_ops.names()}


@pytest.mark.full
def test_the_documented_identities_hold_to_the_errors_that_are_stated() -> None:
    lines = read_table(identities.PAGE, identities.COLUMNS[0])
    stated = {line.split(" | ")[0].strip("| "): line for line in lines[2:]}
    measured = dict(identities.measured_errors())
    assert list(measured) == list(stated)
    for name, error in measured.items():
        bound = float(stated[name].split("|")[2])
        # Another machine sums in another order.
        assert error <= 10 * max(bound, 1e-16), (name, error, bound)
