"""The examples in docstrings, run as a reader would run them."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

from tests.support import hf_models
from tests.test_layout import MODULES

Defined = ast.Module | ast.ClassDef | ast.FunctionDef


def examples() -> dict[str, tuple[str, str]]:
    """Module and docstring of every definition whose docstring has an example."""
    collected: dict[str, tuple[str, str]] = {}

    def visit(module: str, node: Defined, address: str) -> None:
        text = ast.get_docstring(node) or ""
        if ">>>" in text:
            collected[address] = (module, text)
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                visit(module, child, f"{address}.{child.name}")

    for module, path in MODULES.items():
        visit(module, ast.parse(path.read_text(encoding="utf-8")), module)
    return collected


EXAMPLES = examples()


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What examples may name: a tiny Llama's folder, and a folder of texts."""
    texts = tmp_path_factory.mktemp("texts")
    for i in range(8):
        words = " ".join(f"w{(i + j) % 90}" for j in range(50))
        (texts / f"{i}.txt").write_text(words)
    folder = hf_models.save(hf_models.llama(), tmp_path_factory.mktemp("doctest"))
    return {"FOLDER": str(folder), "TEXTS": str(texts)}


def test_at_least_thirty_functions_have_an_example() -> None:
    assert len(EXAMPLES) >= 30, sorted(EXAMPLES)


@pytest.mark.parametrize("address", sorted(EXAMPLES))
def test_the_example_in_a_docstring_runs(
    address: str,
    paths: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    module, text = EXAMPLES[address]
    names = {**vars(importlib.import_module(module)), **paths}
    parsed = doctest.DocTestParser().get_doctest(text, names, address, None, 0)
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    report: list[str] = []
    runner.run(parsed, out=report.append)
    assert runner.failures == 0, "".join(report)
