"""`dew.load("model.gguf")`: a GGUF file in the place of a folder."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import dew
from dew.cli import main
from tests.converters.gguf.cases import CASES
from tests.converters.gguf.writer import gguf_of
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    before = os.environ.get("DEW_CACHE")
    os.environ["DEW_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("DEW_CACHE")
    if before is not None:
        os.environ["DEW_CACHE"] = before


def with_words(writer: gguf.GGUFWriter, vocab: int) -> None:
    """Adds a byte-level tokenizer whose last token ends a text."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = [*map(chr, range(97, 123)), "Ġ"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(["the cat sat on the mat and the hat " * 9], trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    unused = [f"[PAD{i}]" for i in range(len(tokens), vocab - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *unused, "<|end|>"])
    writer.add_token_types([1] * len(tokens) + [5] * len(unused) + [3])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(vocab - 1)
    writer.add_chat_template("{{ messages[0].content }}<|end|>")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A llama of transformers, and its file."""
    case = CASES["llama"]

    def extra(writer: gguf.GGUFWriter, config: Any) -> None:
        case.extra(writer, config)
        with_words(writer, config.vocab_size)

    return gguf_of(replace(case, extra=extra), tmp_path_factory.mktemp("gguf"))


def test_a_file_loads_with_all_that_training_needs(tiny: tuple[Any, Path]) -> None:
    model, path = tiny
    loaded, ids = dew.load(path), hf.tokens() % 96
    want = hf.torch_logits(model, ids)
    assert hf.largest_difference(loaded.logits(ids), want) < LOGITS
    assert loaded.address == str(path)
    assert loaded.eos_ids == (95,)
    assert loaded.chat_template == "{{ messages[0].content }}<|end|>"
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the cat").ids) == "the cat"


def test_both_roads_take_it(tiny: tuple[Any, Path]) -> None:
    model, path = tiny
    ids = hf.tokens() % 96
    lowered = dew.load(path, road="lowered").logits(ids)
    assert hf.largest_difference(lowered, hf.torch_logits(model, ids)) < LOGITS


def test_a_trained_model_is_exported_as_a_folder(
    tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    loaded = dew.load(tiny[1])
    trained = hf.shaken(loaded.variables)
    out = dew.save(loaded, tmp_path / "out", trained)
    ids = hf.tokens() % 96
    want = hf.torch_logits(hf.reloaded(out), ids)
    ours = replace(loaded, variables=trained).logits(ids)
    assert hf.largest_difference(ours, want) < LOGITS
    assert {"tokenizer.json", "generation_config.json"} <= set(os.listdir(out))
    assert not [name for name in os.listdir(out) if name.startswith(".")]


def test_the_command_line_scores_and_exports_it(
    tiny: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 20)
    line = f"eval --model {tiny[1]} --data {tmp_path} --seq-len 32 --json"
    assert main(line.split()) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > 60
    assert main(f"export {tiny[1]} {tmp_path / 'out'} --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["certificate"]["passed"]


def test_it_is_converted_once_and_again_when_it_changes(
    tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny[1].read_bytes())
    made = dew.load(path).folder.path / "model.safetensors"
    first = made.stat().st_ino
    dew.load(path)
    assert made.stat().st_ino == first
    _, other = gguf_of(CASES["qwen2"], tmp_path)
    other.replace(path)
    assert dew.load(path).config["model_type"] == "qwen2"


def test_a_url_may_name_a_file(tiny: tuple[Any, Path]) -> None:
    fsspec.filesystem("memory").put(str(tiny[1]), "memory://bucket/tiny.gguf")
    loaded = dew.load("memory://bucket/tiny.gguf")
    assert loaded.content_hash == dew.load(tiny[1]).content_hash


def test_a_hub_id_may_go_on_to_a_file(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    (snapshot / "some").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "some" / "m.gguf").write_bytes(tiny[1].read_bytes())
    addresses = ("hf://org/tiny/some/m.gguf", "hf://org/tiny@main/some/m.gguf")
    script = f"import dew; print([dew.load(a).content_hash for a in {addresses}])"
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str([dew.load(tiny[1]).content_hash] * 2)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"m\.gguf is not a GGUF file"):
        dew.load(tmp_path / "m.gguf")
    (tmp_path / "m.txt").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"m\.txt is a file; .* or a \.gguf file"):
        dew.load(tmp_path / "m.txt")
    with pytest.raises(ValueError, match=r"Name a GGUF file itself: .*/m\.gguf"):
        dew.load(tmp_path)
