"""Runs of the command line that go on elsewhere, and exports from their checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dew.cli import main
from dew.runs import RunFolder
from tests.support import hf_models as hf
from tests.support.tolerances import RTOL


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(hf.llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        words = " ".join(f"w{(i + j) % 90}" for j in range(50))
        (folder / f"{i}.txt").write_text(words)
    return folder


def flags(text: Path, out: Path, *more: str) -> list[str]:
    common = f"""--data {text} --out {out} --steps 2 --batch-size 8 --seq-len 32
        --learning-rate 1e-2 --schedule constant --json"""
    return [*common.split(), *more]


def pretrain(model: Path, text: Path, out: Path, *more: str) -> int:
    return main(["pretrain", "--model", str(model), *flags(text, out, *more)])


def losses(capsys: pytest.CaptureFixture[str]) -> list[float]:
    return json.loads(capsys.readouterr().out)["losses"]


def tensors(folder: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))
    }


@pytest.fixture(scope="module")
def run(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two commits."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert pretrain(model, text, out) == 0
    return out


def test_a_run_goes_on_when_everything_has_moved(
    model: Path,
    text: Path,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = tmp_path / "whole"
    assert pretrain(model, text, whole, "--steps", "4") == 0
    expected = losses(capsys)
    places = [
        shutil.copytree(place, tmp_path / f"moved-{place.name}")
        for place in (model, text, run)
    ]
    # On another mesh, and with other settings of how it runs, too.
    more = """--steps 4 --resume --fsdp 4 --tensor 2 --checkpoint-every 1
        --stack scanned --remat block --keep-checkpoints 3 --log-every 1""".split()
    assert pretrain(places[0], places[1], places[2], *more) == 0
    # The largest difference seen is 3.3e-7.
    np.testing.assert_allclose(losses(capsys), expected[2:], rtol=RTOL["float32"])
    assert RunFolder(places[2]).model().address == str(places[0])


def test_other_weights_at_the_same_address_are_refused_with_both_hashes(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hf.save(hf.llama(), tmp_path / "model")
    assert pretrain(folder, text, tmp_path / "run") == 0
    then = RunFolder(tmp_path / "run").weights()["model"]
    shutil.rmtree(folder)
    hf.save(hf.llama(seed=1), folder)
    assert pretrain(folder, text, tmp_path / "run", "--resume") == 2
    assert f"the weights of --model had the hash {then}" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert f"had the hash {then}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("--learning-rate 0.5", "--learning-rate was 0.01, is 0.5"),
        ("--seq-len 16 --batch-size 4", "--batch-size was 8, is 4; --seq-len was 32"),
        ("--lora-rank 2", "--lora was None, is {"),
        ("--road lowered", "--road was native, is lowered"),
        ("--pad-vocab 64", "--pad-vocab was 1, is 64"),
        ("--dtype bfloat16", "--dtype was float32, is bfloat16"),
    ],
)
def test_what_changes_the_mathematics_is_refused_with_both_values(
    changed: str,
    said: str,
    model: Path,
    text: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert pretrain(model, text, run, "--resume", *changed.split()) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_other_data_is_refused_with_both_values(
    model: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    other = tmp_path / "other"
    other.mkdir()
    (other / "one.txt").write_text("w1 w2 w3 " * 200)
    assert pretrain(model, other, copy, "--resume", "--steps", "3") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "documents was [40] and is [1]" in said


def test_every_flag_is_known_to_change_the_mathematics_or_not() -> None:
    from dew.cli.distill import Distill
    from dew.cli.pretrain import Pretrain
    from dew.runs import FREE

    names = {*Pretrain.__dataclass_fields__, *Distill.__dataclass_fields__}
    # A new flag is put on one of the two lists by thought, not by default.
    assert names - FREE == {
        *("batch_size", "seq_len", "accumulation", "learning_rate", "schedule"),
        *("warmup", "optimizer", "weight_decay", "clip_norm", "seed", "dtype"),
        *("packing", "lora", "pad_vocab", "tied", "dequantise", "ignore_fields"),
        *("bos", "router_loss"),
        *("teacher_road", "terms", "temperature", "top_k"),
        *("on_policy", "on_policy_tokens"),
    }
    assert names >= FREE


def exported(run: Path, out: Path, *more: str) -> dict[str, bytes]:
    assert main(["export", str(run), str(out), "--json", *more]) == 0
    return tensors(out)


@pytest.mark.parametrize(
    "more",
    [
        "--road lowered",
        "--pad-vocab 64 --fsdp 2 --tensor 4",
        "--lora-rank 2 --seed 3",
        pytest.param("--lora-rank 2 --pad-vocab 64", marks=pytest.mark.full),
        pytest.param("--road lowered --fsdp 8", marks=pytest.mark.full),
    ],
)
def test_an_export_from_checkpoints_is_the_runs_own_bit_for_bit(
    more: str, model: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert pretrain(model, text, out, *more.split()) == 0
    own = tensors(out / "export")
    assert own
    assert exported(out, tmp_path / "again") == own


def test_a_tied_override_is_in_the_export_from_checkpoints(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The config ties the head, and the file has another one.
    folder = hf.save(hf.llama(), tmp_path / "model")
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"tie_word_embeddings": True}
    file.write_text(json.dumps(config))
    assert pretrain(folder, text, tmp_path / "run") == 2
    assert "tie" in capsys.readouterr().err
    assert pretrain(folder, text, tmp_path / "run", "--tied", "stored") == 0
    own = tensors(tmp_path / "run" / "export")
    assert exported(tmp_path / "run", tmp_path / "out") == own


def test_ignored_fields_are_ignored_in_the_export_from_checkpoints(
    text: Path, tmp_path: Path
) -> None:
    folder = hf.save(hf.llama(), tmp_path / "model")
    file = folder / "config.json"
    windows = {"layer_types": ["full_attention"] * 2}
    file.write_text(json.dumps(json.loads(file.read_text()) | windows))
    native = ("--road", "native")
    assert pretrain(folder, text, tmp_path / "run", *native) == 2
    ignored = (*native, "--ignore-fields", "layer_types")
    assert pretrain(folder, text, tmp_path / "run", *ignored) == 0
    own = tensors(tmp_path / "run" / "export")
    assert exported(tmp_path / "run", tmp_path / "out") == own


def test_a_distilled_student_with_projectors_is_exported_without_them(
    text: Path, tmp_path: Path
) -> None:
    teacher = hf.save(hf.llama(), tmp_path / "teacher")
    narrow = {"hidden_size": 16, "intermediate_size": 32}
    student = hf.save(hf.llama(seed=1, **narrow), tmp_path / "student")
    command = f"distill --teacher {teacher} --student {student} --teacher-road native"
    terms = "--terms kl hidden=0.1".split()
    out = tmp_path / "run"
    assert main([*command.split(), *flags(text, out), *terms]) == 0
    own = tensors(out / "export")
    assert exported(out, tmp_path / "again") == own


def test_the_record_of_a_run_has_all_that_its_model_was_loaded_with(
    run: Path, model: Path
) -> None:
    record: dict[str, Any] = json.loads((run / "run.json").read_text())
    assert record["model"] == {
        "address": str(model),
        "pad_vocab": 1,
        "lora": None,
        "road": "native",
        "tied": None,
        "dequantise": False,
        "ignore_fields": [],
    }
    assert record["sources"] == {str(model): record["weights"]["model"]}
    assert len(jax.devices()) == 8
