"""An adapter from the command line: trained, exported, merged, and read again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from safetensors.numpy import load_file

import dew
from dew.cli import main
from dew.converters.folder.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.support import hf_models as hf
from tests.support.tolerances import ATOL

pytestmark = pytest.mark.filterwarnings(
    # PEFT asks transformers by a name that is going away.
    "ignore:.is_gradient_checkpointing.:FutureWarning"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(hf.llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = " ".join(f"w{i % 90}" for i in range(2000))
    (folder / "counting.txt").write_text(words)
    return folder


def command(model: Path, text: Path, out: Path, *more: str) -> list[str]:
    return (
        f"""pretrain --model {model} --data {text} --out {out} --steps 3
        --batch-size 8 --seq-len 16 --learning-rate 3e-2 --schedule constant --json
        --lora-rank 4 --lora-targets q_proj v_proj down_proj --lora-dropout 0.1
        """.split()
        + list(more)
    )


@pytest.fixture(scope="module")
def run(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert main(command(model, text, out)) == 0
    return out


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_run_exports_its_adapter_and_proves_it(model: Path, run: Path) -> None:
    names = {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "certificate.json"}
    assert {path.name for path in (run / "export").iterdir()} == names
    certificate = json.loads((run / "export" / "certificate.json").read_text())
    losses = certificate["run"]["losses"]
    assert certificate["passed"]
    assert losses[-1] < losses[0]
    theirs: Any = PeftModel.from_pretrained(hf.reloaded(model), run / "export").eval()
    ids = hf.tokens(1, 12)
    ours = dew.load(run).logits(ids)
    assert hf.largest_difference(hf.torch_logits(theirs, ids), ours) < ATOL["float32"]


def test_export_writes_the_adapter_of_the_checkpoint_or_the_whole(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    assert main(["export", str(run), str(alone), "--adapter-only"]) == 0
    first, second = (load_file(f / ADAPTER_WEIGHTS) for f in (alone, run / "export"))
    assert all(np.array_equal(first[name], second[name]) for name in second)
    capsys.readouterr()
    assert main(["export", str(run), str(whole), "--merge", "--json"]) == 0
    assert printed(capsys)["certificate"]["passed"]
    ids = hf.tokens(1, 12)
    merged = hf.torch_logits(hf.reloaded(whole), ids)
    assert hf.largest_difference(merged, dew.load(run).logits(ids)) < ATOL["float32"]


@pytest.mark.full
def test_an_adapter_is_taken_where_a_model_is_and_trained_further(
    run: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = f"generate --model {run / 'export'} --prompt w1 --json"
    assert main([*generate.split(), "--max-new-tokens", "2"]) == 0
    further = f"""pretrain --model {run / "export"} --data {text} --steps 1 --json
    --batch-size 8 --seq-len 16 --out {tmp_path / "run"}""".split()
    assert main(further) == 0
    assert (tmp_path / "run" / "export" / ADAPTER_CONFIG).is_file()


def test_flags_that_do_not_fit_are_refused(
    model: Path,
    text: Path,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(model, text, run, "--resume", "--lora-alpha", "3")) == 2
    assert "--lora was" in capsys.readouterr().err
    out = str(tmp_path / "out")
    assert main(["export", str(model), out, "--adapter-only"]) == 2
    assert "has none" in capsys.readouterr().err
    assert main(["export", str(model), out, "--merge"]) == 2
    assert "has no adapter to merge" in capsys.readouterr().err
