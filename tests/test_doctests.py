"""The examples in public docstrings, run as a reader would run them."""

import doctest
import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import hf_models
from tests.test_layout import MODULES

FACES = [name for name, path in MODULES.items() if path.name == "__init__.py"]


def examples() -> dict[str, tuple[Any, str]]:
    """Each public object whose docstring holds an example, by its shortest address."""
    chosen: dict[int, tuple[str, Any, str]] = {}
    for face in [*FACES, "dew.objectives.base"]:
        module = importlib.import_module(face)
        names = getattr(module, "__all__", vars(module))
        for name in names:
            value = getattr(module, name)
            text = getattr(value, "__doc__", None) or ""
            address = f"{face}.{name}"
            is_ours = str(getattr(value, "__module__", "")).startswith("dew.")
            if ">>>" not in text or not is_ours:
                continue
            if id(value) not in chosen or len(address) < len(chosen[id(value)][0]):
                chosen[id(value)] = (address, value, text)
    return {address: (value, text) for address, value, text in chosen.values()}


EXAMPLES = examples()


@pytest.fixture(scope="session")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What examples may name: a tiny Llama's folder, and a folder of texts."""
    texts = tmp_path_factory.mktemp("texts")
    for i in range(8):
        words = " ".join(f"w{(i + j) % 90}" for j in range(50))
        (texts / f"{i}.txt").write_text(words)
    folder = hf_models.save(hf_models.llama(), tmp_path_factory.mktemp("doctest"))
    return {"FOLDER": str(folder), "TEXTS": str(texts)}


def test_at_least_thirty_public_functions_have_an_example() -> None:
    assert len(EXAMPLES) >= 30, sorted(EXAMPLES)


@pytest.mark.parametrize("address", sorted(EXAMPLES))
def test_the_example_in_a_docstring_runs(
    address: str,
    names: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    _, text = EXAMPLES[address]
    parsed = doctest.DocTestParser().get_doctest(text, dict(names), address, None, 0)
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    report: list[str] = []
    runner.run(parsed, out=report.append)
    assert runner.failures == 0, "".join(report)
    assert Path(os.getcwd()) == tmp_path
