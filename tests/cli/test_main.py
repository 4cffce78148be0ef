"""The command line on a tiny real folder: what it writes, prints and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from dew.cli import main
from dew.runs import RunFolder, TrainedModel
from tests.support import hf_models as hf
from tests.support.tolerances import ATOL, RTOL

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(hf.llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents that count upwards, which a model can learn."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        words = " ".join(f"w{(i + j) % 90}" for j in range(50))
        (folder / f"{i}.txt").write_text(words)
    return folder


def pretrain(model: Path, text: Path, out: Path, *more: str) -> list[str]:
    return (
        f"""pretrain --model {model} --data {text} --eval-data {text} --out {out}
        --steps 4 --batch-size 8 --seq-len 32 --learning-rate 1e-2 --json
        """.split()
        + list(more)
    )


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def run(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run's folder."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert main(pretrain(model, text, out)) == 0
    return out


def test_pretrain_learns_and_prints_what_was_promised(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(pretrain(model, text, tmp_path / "run")) == 0
    result = printed(capsys)
    assert (
        result["eval"]["after"]["perplexity"] < result["eval"]["before"]["perplexity"]
    )
    assert (result["steps"], len(result["losses"]), result["tokens"]) == (4, 4, 1024)
    assert result["certificate"]["passed"]
    assert result["tokens_per_second"] > 0


def test_a_run_folder_holds_what_it_should(run: Path) -> None:
    names = {"run.json", "checkpoints", "logs", "export"}
    assert {path.name for path in run.iterdir()} == names
    certificate = json.loads((run / "export" / "certificate.json").read_text())
    assert certificate["run"]["eval"]["before"]["tokens"] > 0


def test_the_first_loss_is_the_one_transformers_gives(
    model: Path, text: Path, run: Path
) -> None:
    import torch

    from dew.data import open_documents, training_batches

    source = hf.reloaded(model)
    batch = next(
        training_batches(
            open_documents(str(text)),
            tokenizer=_tokenizer(model),
            seq_len=32,
            batch_size=8,
            seed=0,
            eos_id=2,
        )
    )
    segments = torch.tensor(batch["segment_ids"])
    allowed = (segments[:, :, None] == segments[:, None, :]).tril()
    bias = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[:, None]
    labels = torch.tensor(batch["tokens"]).long()
    labels[:, 1:][segments[:, 1:] != segments[:, :-1]] = -100
    with torch.no_grad():
        want = source(
            torch.tensor(batch["tokens"]).long(),
            attention_mask=bias,
            position_ids=torch.tensor(batch["positions"]).long(),
            labels=labels,
        ).loss
    certificate = json.loads((run / "export" / "certificate.json").read_text())
    # The difference seen is 0.
    assert certificate["run"]["losses"][0] == pytest.approx(
        float(want), abs=ATOL["float32"]
    )


def _tokenizer(model: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json"))


def test_a_run_is_taken_wherever_a_model_is(
    run: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"eval --model {run} --data {text} --seq-len 32 --json"
    assert main(command.split()) == 0
    kept = json.loads((run / "export" / "certificate.json").read_text())
    after = kept["run"]["eval"]["after"]["perplexity"]
    # Batches of another size sum in another order.
    assert printed(capsys)["perplexity"] == pytest.approx(after, rel=RTOL["float32"])


def test_a_run_exports_from_its_checkpoint_what_it_exported_itself(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--json"]) == 0
    again, first = (
        (folder / "model.safetensors").read_bytes()
        for folder in (tmp_path / "out", run / "export")
    )
    assert again == first
    assert "model.safetensors" in printed(capsys)["files"]


def test_a_run_records_its_model_and_exports_by_the_record_alone(
    model: Path, run: Path, tmp_path: Path
) -> None:
    record = json.loads((run / "run.json").read_text())
    assert record["model"]["address"] == str(model)
    assert _exported(run, {**record, "config": {}}, tmp_path) == _weights(run)


@pytest.mark.parametrize("field", ["model", "student"])
def test_a_run_of_before_the_record_exports_by_its_settings(
    field: str, model: Path, run: Path, tmp_path: Path
) -> None:
    record = json.loads((run / "run.json").read_text())
    del record["model"]
    settings = {field: str(model), "pad_vocab": 1, "lora": None}
    assert _exported(run, {**record, "config": settings}, tmp_path) == _weights(run)


def _exported(run: Path, record: dict[str, Any], folder: Path) -> bytes:
    """Weights that `dew export` writes of a run's checkpoints by another run.json."""
    copy = folder / "copy"
    copy.mkdir()
    (copy / "checkpoints").symlink_to(run / "checkpoints")
    (copy / "run.json").write_text(json.dumps(record))
    assert main(["export", str(copy), str(folder / "out"), "--json"]) == 0
    return (folder / "out" / "model.safetensors").read_bytes()


def _weights(run: Path) -> bytes:
    return (run / "export" / "model.safetensors").read_bytes()


def test_a_run_of_before_the_record_keeps_padding_and_adapter(tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}
    settings = {"student": "base", "model": "other", "pad_vocab": 64, "lora": lora}
    (tmp_path / "run.json").write_text(json.dumps({"config": settings}))
    expected = TrainedModel(address="base", pad_vocab=64, lora=lora)
    assert RunFolder(tmp_path).model() == expected


def test_an_untouched_export_is_bit_for_bit(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(model), str(out)]) == 0
    capsys.readouterr()
    same = {p.name for p in model.iterdir() if p.name != "model.safetensors"}
    assert {p.name for p in out.iterdir()} - {"model.safetensors"} == {
        *same,
        "certificate.json",
    }
    assert all((out / n).read_bytes() == (model / n).read_bytes() for n in same)


def test_verify_passes_a_good_folder_and_prints_the_certificate(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("w1 w2 w3\nw7\n")
    arguments = ["verify", str(model), "--prompt-file", str(prompts), "--json"]
    assert main(arguments) == 0
    proof = printed(capsys)
    assert [text["prompt"] for text in proof["continuations"]] == ["w1 w2 w3", "w7"]
    assert proof["missing"] == proof["unexpected"] == proof["mismatched"] == []


def test_generate_continues_as_torch_does(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    arguments = f"generate --model {model} --max-new-tokens 8 --json --prompt".split()
    assert main([*arguments, "w1 w2 w3"]) == 0
    ids = torch.tensor([[1, 2, 3]])
    theirs: Any = hf.reloaded(model)
    new = theirs.generate(ids, max_new_tokens=8, do_sample=False)[0, 3:]
    assert printed(capsys)["text"] == _tokenizer(model).decode(new.tolist())


def test_a_run_is_resumed_only_when_asked(
    model: Path, text: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(pretrain(model, text, run)) == 2
    assert "pass --resume" in capsys.readouterr().err
    assert main([*pretrain(model, text, run, "--resume"), "--seed", "3"]) == 2
    assert "--seed was 0, is 3" in capsys.readouterr().err


def test_a_resumed_run_goes_on(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = ("--schedule", "constant")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(pretrain(model, text, whole, *constant)) == 0
    expected = printed(capsys)["losses"]
    assert main(pretrain(model, text, parts, *constant, "--steps", "2")) == 0
    first = printed(capsys)["losses"]
    assert main(pretrain(model, text, parts, *constant, "--resume")) == 0
    assert first + printed(capsys)["losses"] == expected
    done = sorted(path.stat().st_mtime_ns for path in parts.rglob("*"))
    assert (
        main(pretrain(model, text, parts, *constant, "--resume", "--steps", "1")) == 2
    )
    assert "must be at least the 4 steps" in " ".join(capsys.readouterr().err.split())
    assert sorted(path.stat().st_mtime_ns for path in parts.rglob("*")) == done


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("eval --model nowhere/at/all --data x", "nowhere/at/all"),
        ("eval --model {model} --data {model}/nothing.txt", "nothing.txt"),
        ("eval --model {model} --data {empty}", "empty.txt"),
        ("eval --model {broken} --data {text}", "config.json"),
        ("pretrain --model {model} --data {text} --out {taken}", "is in use"),
        ("pretrain --model {model} --data {text} --out o --steps 0", "steps"),
        ("verify {text}", "config.json"),
        ("export {model} o.gguf", "convert_hf_to_gguf"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    arguments: str,
    said: str,
    model: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    empty, broken, taken = (tmp_path / n for n in ("empty.txt", "broken", "taken"))
    empty.write_text("")
    for folder in (broken, taken):
        folder.mkdir()
        (folder / "thing").write_text("")
    places = {"model": model, "text": text, "empty": empty, "broken": broken}
    assert main(arguments.format(**places, taken=taken).split()) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("dew: error: ")
    assert said in error


def test_an_unknown_flag_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["eval", "--modle", "x"])
    assert "--modle" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["pretrain", "eval", "generate", "export", "verify"]
)
def test_help_reads_well(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert "--json" in shown
